"""A plan as text."""

from __future__ import annotations

import expecttest
from support_plan import Build, layer_forward, model_backward

from pgraph.template.plan import make_plan


class Snapshots(expecttest.TestCase):
    def test_layer_forward(self) -> None:
        build = layer_forward(8192, 28672)
        self.assertExpectedInline(
            make_plan(build.n, build.lives, slack_bytes=0).render(),
            """\
plan: 13 nodes, 2 chunks, 6 blocks, peak 102,400 B, eager 102,400 B
chunk 0: nodes [0, 11), held 102,400 B
  + b0 28,672 B: r1@0 r2@8,192 r3@16,384 r5@0 r6@8,192 r9@0
  + b1 28,672 B: r4@0 r8@0 r11@0
  + b2 8,192 B: r7@0
  + b3 28,672 B: r10@0
  - b0 b3
chunk 1: nodes [11, 13), held 61,440 B
  + b4 8,192 B: r12@0
  + b5 8,192 B: r13@0
  - b1 b2 b4
""",
        )

    def test_backward(self) -> None:
        build = model_backward(2, 8192, 28672, 20480)
        self.assertExpectedInline(
            make_plan(build.n, build.lives, slack_bytes=0).render(),
            """\
plan: 24 nodes, 5 chunks, 23 blocks, peak 724,992 B, eager 724,992 B
chunk 0: nodes [0, 4), held 724,992 B
  + b0 28,672 B: r13@0 r15@0
  + b1 28,672 B: r14@0
  + b2 20,480 B: r22@0
  - b1
  ~ r9
chunk 1: nodes [4, 6), held 724,992 B
  + b3 8,192 B: r16@0 r19@0
  + b4 20,480 B: r23@0
  + b5 8,192 B: r17@0 r20@0
  + b6 20,480 B: r24@0
  - b0
  ~ r8 r10 r7 r11
chunk 2: nodes [6, 13), held 712,704 B
  + b7 20,480 B: r18@0 r28@0
  + b8 20,480 B: r25@0
  + b9 20,480 B: r26@0
  + b10 20,480 B: r27@0
  + b11 8,192 B: r21@0 r45@0 r48@0
  - b3 b5
  ~ r6 r12 r5 r4 r3 r2 r1
chunk 3: nodes [13, 17), held 716,800 B
  + b12 28,672 B: r42@0 r44@0
  + b13 28,672 B: r43@0
  + b14 20,480 B: r51@0
  + b15 20,480 B: r52@0
  - b12 b13
  ~ r38 r37 r39
chunk 4: nodes [17, 24), held 712,704 B
  + b16 20,480 B: r46@0 r47@8,192 r57@0
  + b17 20,480 B: r53@0
  + b18 20,480 B: r54@0
  + b19 20,480 B: r55@0
  + b20 8,192 B: r49@0
  + b21 20,480 B: r56@0
  + b22 8,192 B: r50@0
  - b11 b20 b22
  ~ r36 r40 r35 r41 r34 r33 r32 r31 r30
""",
        )

    def test_chain_of_temporaries(self) -> None:
        build = Build(8)
        build.input(4096, 1)
        for k in range(7):
            build.temp(4096 if k % 2 else 2048, k, k + 2 if k < 6 else 8)
        build.output(4096, 7)
        self.assertExpectedInline(
            make_plan(build.n, build.lives, slack_bytes=0).render(),
            """\
plan: 8 nodes, 2 chunks, 2 blocks, peak 6,144 B, eager 6,144 B
chunk 0: nodes [0, 1), held 6,144 B
  + b0 2,048 B: r1@0 r3@0 r5@0 r7@0
  ~ r0
chunk 1: nodes [1, 8), held 6,144 B
  + b1 4,096 B: r2@0 r4@0 r6@0 r8@0
  - b0
""",
        )
