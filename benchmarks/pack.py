"""How long planning a packing takes, and how full its rows become, by strategy and length of a row.

python benchmarks/pack.py [DOCUMENTS]
"""

import sys

import rows
from cases import timed

from strop.data.pack import STRATEGIES


def main(count: int) -> None:
    lengths = rows.documents(count).with_format("arrow")[:]["input_ids"].combine_chunks().value_lengths().to_numpy()
    print(f"{count:,} documents, {lengths.sum():,} tokens")
    print(
        f"{'strategy':10} {'seq_length':>10} {'s / 100k documents':>18} {'rows':>8} {'filled':>7} {'tokens kept':>12}"
    )
    for strategy, plan_rows in STRATEGIES.items():
        for seq_length in (512, 2048, 8192, 131_072):
            plan, cpu, _ = timed(lambda plan_rows=plan_rows, n=seq_length: plan_rows(lengths, n))
            num_rows, kept = len(plan.bounds) - 1, plan.lengths.sum()
            print(
                f"{strategy:10} {seq_length:10,} {cpu / count * 100_000:18.3f} {num_rows:8,} "
                f"{kept / (num_rows * seq_length):7.2%} {kept / lengths.sum():12.2%}"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200_000)
