"""Every decision of a reinforcement-learning run, as dataclasses that check themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

from trillium_moe.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig, check, check_choice
from trillium_moe.rl.protocol import EFFORTS

OBJECTIVES = ("k25", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "k15", "reinforce")


@dataclass(frozen=True)
class TaskConfig:
    """What is played."""

    envs: tuple[str, ...] = ("read_page",)  # name, or name:option=value:...; tasks take turns over them
    efforts: tuple[str, ...] = ()  # messages in the prompt, of low, high, max; (): none
    call_cost: float = 0.02  # taken from the reward at every turn that is not the answer
    noise: float = 0.0  # probability that the verdict on a trajectory is turned around, in training only
    sparse: bool = False  # only the last turn's reward counts
    delay: int = 0  # turns by which rewards come later; what would come after the end comes with the last turn

    def __post_init__(self):
        from trillium_moe.rl.env import make_env

        check(len(self.envs) > 0, "task.envs", self.envs, "must name at least one environment")
        for spec in self.envs:
            make_env(spec)
        for effort in self.efforts:
            check_choice("task.efforts", effort, EFFORTS)
        check(0 <= self.noise <= 0.5, "task.noise", self.noise, "must lie in [0, 0.5]; at 0.5 verdicts say nothing")
        check(self.delay >= 0, "task.delay", self.delay, "must be 0 or more")


@dataclass(frozen=True)
class RolloutConfig:
    """How trajectories are sampled."""

    groups: int = 16  # tasks in flight
    samples: int = 8  # trajectories of a task
    pause: float = 1.0  # a rollout ends when this fraction of the trajectories in flight has finished
    lag: int = 0  # updates that a rollout serves besides the first: the age of its last batch, in policy versions
    max_age: int = 0  # groups with an older token are dropped, and counted; 0: none are
    refill: int = 1  # further rollouts, at most, to replace groups whose samples all have the same reward
    temperature: float = 1.0
    max_message: int = 8  # sampled tokens of a turn; a longer one ends the trajectory
    max_tokens: int = 192  # of a trajectory's context; one that would be longer ends
    max_seconds: float = 0.0  # of a trajectory; 0: no limit. With one, a run can no longer be repeated exactly
    chunks: tuple[int, ...] = (24,)  # tokens of a prefill program
    steps: int = 5  # tokens of a decoding program; a message that needs more takes several
    exact: bool = False  # sample from training's own forward pass: at equal weights both give the same probabilities

    def __post_init__(self):
        for name in ("groups", "samples", "max_message", "steps"):
            check(getattr(self, name) > 0, f"rollout.{name}", getattr(self, name), "must be greater than 0")
        check(0 < self.pause <= 1, "rollout.pause", self.pause, "must lie in (0, 1]")
        for name in ("lag", "max_age", "refill", "max_seconds"):
            check(getattr(self, name) >= 0, f"rollout.{name}", getattr(self, name), "must be 0 or more")
        check(self.temperature > 0, "rollout.temperature", self.temperature, "must be greater than 0")
        check(self.max_tokens > 2 * self.max_message, "rollout.max_tokens", self.max_tokens,
              f"must be more than two messages of rollout.max_message={self.max_message}")


@dataclass(frozen=True)
class ObjectiveConfig:
    """The loss (`trillium_moe.rl.objectives`) and the credit of turns (`trillium_moe.rl.credit`)."""

    name: str = "k25"
    alpha: float = -1.0  # k25: tokens whose log-ratio leaves [alpha, beta] give no policy gradient
    beta: float = 1.0
    tau: float = 0.05  # k25, k15: weight of the squared log-ratio
    clip: float = 0.2  # grpo, dr_grpo, dapo, gspo, cispo: ratios are clipped to [1 - clip, 1 + clip_high]
    clip_high: float = 0.0  # 0: as clip
    old: str = "sampler"  # ratios are taken against the sampler's log-probabilities, or the trainer's before the update
    tis: float = 0.0  # importance weights min(trainer / sampler, tis) on tokens, with old=trainer; 0: none
    kl: float = 0.0  # weight of the divergence from the policy that RL began with
    kl_anneal: int = 0  # updates over which that weight falls to zero, linearly; 0: it stays
    credit: str = "outcome"  # outcome: one return a trajectory; turn: the discounted return from every turn on
    baseline: str = "mean"  # of the group, leave_one_out, or turn: the group's mean at the same turn (credit=turn)
    std: bool = False  # divide advantages by the group's standard deviation
    gamma: float = 1.0  # discount a turn (credit=turn, shaping)
    shaping: float = 0.0  # weight of gamma * potential' - potential

    def __post_init__(self):
        check_choice("objective.name", self.name, OBJECTIVES)
        check_choice("objective.old", self.old, ("sampler", "trainer"))
        check_choice("objective.credit", self.credit, ("outcome", "turn"))
        check_choice("objective.baseline", self.baseline, ("mean", "leave_one_out", "turn"))
        check(self.baseline != "turn" or self.credit == "turn", "objective.baseline", self.baseline,
              "needs objective.credit='turn'")
        check(self.alpha < 0 < self.beta, "objective.alpha", self.alpha, f"must be below 0, and beta={self.beta} above")
        check(0 < self.clip, "objective.clip", self.clip, "must be greater than 0")
        for name in ("tau", "clip_high", "tis", "kl", "kl_anneal", "shaping"):
            check(getattr(self, name) >= 0, f"objective.{name}", getattr(self, name), "must be 0 or more")
        check(not self.tis or self.old == "trainer", "objective.tis", self.tis,
              "needs objective.old='trainer': it weighs the trainer's probabilities against the sampler's")
        check(0 < self.gamma <= 1, "objective.gamma", self.gamma, "must lie in (0, 1]")


@dataclass(frozen=True)
class EffortConfig:
    """Token budgets: a trajectory of more than tau * b0 sampled tokens gets the reward -1, whatever it achieved."""

    tau: tuple[float, ...] = ()  # one for each of task.efforts; (): no budgets
    start: float = 2.0  # tau begins here for all efforts
    anneal: int = 50  # updates over which it goes to its own value, linearly
    b0: float = 0.0  # tokens; 0: the mean over the first rollout, that is of the policy RL began with

    def __post_init__(self):
        check(all(t > 0 for t in self.tau), "effort.tau", self.tau, "must be greater than 0")
        check(self.anneal >= 0 and self.start > 0 and self.b0 >= 0, "effort.start", self.start, "must not be negative")


@dataclass(frozen=True)
class SFTConfig:
    """Supervised training on traces, before RL."""

    steps: int = 150
    policy: str = "explorer"  # explorer: valid calls with random choices; oracle: the upper bound
    answers: float = 0.0  # share of traces that are lessons in answering, of which only the answer is learned
    give_up: float = 0.0  # share of the other traces that end with "none" after 1 to all calls, drawn for each: budgets
    # need policies that sometimes stop early
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=5e-3, warmup=0.05))

    def __post_init__(self):
        check_choice("sft.policy", self.policy, ("explorer", "oracle"))
        check(0 <= self.answers < 1, "sft.answers", self.answers, "must lie in [0, 1): the rest shows the calls")
        check(0 <= self.give_up <= 1, "sft.give_up", self.give_up, "must lie in [0, 1]")
        check(not self.give_up or self.policy == "explorer", "sft.give_up", self.give_up, "needs sft.policy='explorer'")
        check(self.steps > 0, "sft.steps", self.steps, "must be greater than 0: RL needs the protocol")


@dataclass(frozen=True)
class RLConfig:
    """One run: format SFT, then RL."""

    name: str = "read_page"
    seed: int = 0
    updates: int = 150
    row: int = 192  # tokens of a training row, filled with whole trajectories
    rows: int = 16  # of a micro-batch: an SFT step has one, an update of RL as many as its trajectories fill
    log_every: int = 5
    eval_every: int = 25  # updates between held-out evaluations; 0: at the beginning and the end
    eval_tasks: int = 128
    checkpoint_every: int = 50  # updates; 0: at the end
    keep: int = 2
    entropy_floor: float = 0.01  # alarm when the policy's mean entropy, nats a token, falls below
    sft_only: bool = True  # a second arm: SFT goes on for as much computation as RL took
    start: str = ""  # run directory whose policy RL begins with, or RUN/sft for the one it began with; "": own SFT
    teachers: tuple[str, ...] = ()  # run directories of experts: their policies replace the rewards (distillation)
    teacher_clip: float = 2.0  # token rewards are clipped to this, nats
    model: ModelConfig = field(default_factory=ModelConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-3, schedule="wsd", decay=0.0))
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    effort: EffortConfig = field(default_factory=EffortConfig)

    def __post_init__(self):
        for name in ("updates", "row", "rows", "log_every", "eval_tasks", "keep"):
            check(getattr(self, name) > 0, name, getattr(self, name), "must be greater than 0")
        check(self.row >= self.rollout.max_tokens, "row", self.row,
              f"must hold a trajectory of rollout.max_tokens={self.rollout.max_tokens}")
        separate = self.model.scan_layers and self.model.remat != "none"
        check(not self.rollout.exact or separate, "rollout.exact", True, "needs model.scan_layers=True and model.remat "
              "block or layer: compiled together with a backward pass, the forward pass rounds at other places")
        check(not self.effort.tau or len(self.effort.tau) == len(self.task.efforts), "effort.tau", self.effort.tau,
              f"must have one value for each of task.efforts={self.task.efforts}")

    def training(self, optim: OptimConfig, steps: int) -> Config:
        """What the supervised step and the optimizer need to know."""
        data = DataConfig(seq_len=self.row, batch_size=self.rows)
        return Config(name=self.name, seed=self.seed, model=self.model, data=data, optim=optim,
                      train=TrainConfig(steps=max(1, steps)))
