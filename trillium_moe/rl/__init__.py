"""Reinforcement learning over many turns: environments, protocol, rollouts on the engine, objectives, the loop."""
