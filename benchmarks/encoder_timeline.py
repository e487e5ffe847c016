"""On paper: speed of an encoder on a rank of its own beside a language model, against one rank that has both.

    python benchmarks/encoder_timeline.py

A backward costs twice the forward, and messages cost nothing. Prints a line for each number of pipeline stages and of
microbatches, with a column for each share of the language model's work that the encoder has.
"""

from automodel_rl.config import ParallelConfig
from automodel_rl.parallel.pipeline.timeline import simulate

SHARES = (0.25, 0.5, 0.75, 1.0)


def main() -> None:
    print("stages  microbatches  " + "  ".join(f"{share:>5}" for share in SHARES))
    for pp in (1, 3):
        parallel = ParallelConfig(pp=pp)
        for count in (4, 16, 64):
            apart = [simulate(parallel, count, [1 / pp] * pp, [1.0] * pp, share).length for share in SHARES]
            ratios = [3 * count * (1 + share) / length for share, length in zip(SHARES, apart, strict=True)]
            print(f"{pp:>6}  {count:>12}  " + "  ".join(f"{ratio:5.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
