"""Traffic read from a program's text."""

from trillium_moe.parallel.hlo import Traffic, collectives

HLO = """HloModule m

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

%rare (p: bf16[4]) -> bf16[4] {
  ROOT %ar = bf16[1000]{0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%sum
}

%often (p: bf16[4]) -> bf16[4] {
  ROOT %ag = bf16[8,100]{1,0} all-gather(%p), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
}

%loop (s: (s32[], bf16[4])) -> (s32[], bf16[4]) {
  %a = f32[10]{0} all-reduce(%p), replica_groups=mesh['data'=2,'expert'=2,'model'=2] {'data','model'}, to_apply=%sum
  ROOT %t = (s32[], bf16[4]) tuple(%j, %c)
}

%body (s: (s32[], bf16[4])) -> (s32[], bf16[4]) {
  %c = bf16[4] conditional(%i, %x, %y), branch_computations={%rare, %often}
  ROOT %t = (s32[], bf16[4]) tuple(%j, %c)
}

%cond (s: (s32[], bf16[4])) -> pred[] {
  %n = s32[]{:T(128)} constant(10)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%wrapped (x: f32[100]) -> f32[100] {
  ROOT %a2a = f32[100]{0} all-to-all(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
}

ENTRY %main (x: bf16[4]) -> bf16[4] {
  %w = (s32[], bf16[4]) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"10"}}
  %v = (s32[], bf16[4]) while(%init), condition=%cond, body=%loop
  %as = ((f32[100]), f32[100]) async-start(%x), calls=%wrapped
  %ad = f32[100] async-done(%as), calls=%wrapped
  %rs = f32[25]{0} reduce-scatter(%g), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, to_apply=%sum
  ROOT %p = (bf16[50]{0}, bf16[50]{0}) collective-permute-start(%q), source_target_pairs={{0,1},{1,0}}
}
"""


def test_loops_branches_and_groups():
    found = collectives(HLO, branch_shares=[0.2, 0.8], per_slice=4)
    assert found == {
        ("all-reduce", False): Traffic(2, 2 * 2000 * 2 * 3 / 4),
        ("all-gather", True): Traffic(8, 8 * 1600 / 2),  # devices 0 and 4: two slices of 4
        ("reduce-scatter", False): Traffic(1, 100 * 3),
        ("collective-permute", False): Traffic(1, 100),
        ("all-reduce", True): Traffic(10, 10 * 40 * 2 * 3 / 4),  # devices 0, 1, 4, 5
        ("all-to-all", False): Traffic(1, 400 * 3 / 4),
    }
    # without a schedule the costlier branch counts
    assert ("all-gather", True) not in collectives(HLO, per_slice=4)
    assert collectives(HLO)["all-reduce", False].count == 20
