"""Time what sampling one row of logits costs the host, beside the plain float64 definition.

    python benchmarks/sampling.py                     a vocabulary of 50,288
    python benchmarks/sampling.py --vocab 262144

Rows: `text` falls off like a language model's (a power of the rank), `flat` is nearly level.
Each figure is the median over rounds of the microseconds of processor time a row takes in its
thread, with the first and the third quartile. The definition is in float64 and sorts the whole row
for top-k and top-p; it takes turns with the sampler, round by round, so that both see the same
machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import numpy as np
from builds import describe, machine, table

from runtime.dry import Breakers
from runtime.sampling import Sampler, SamplingParams, logprobs

CHAINS = {
    "greedy": SamplingParams(),
    "temperature 0.8": SamplingParams(0.8, seed=1),
    "temperature 1": SamplingParams(1.0, seed=1),
    "top-k 40": SamplingParams(0.8, top_k=40, seed=1),
    "top-k 40, top-p 0.95": SamplingParams(0.8, top_k=40, top_p=0.95, seed=1),
    "top-p 0.95": SamplingParams(0.8, top_p=0.95, seed=1),
    "min-p 0.05": SamplingParams(0.8, min_p=0.05, seed=1),
}
PENALTIES = {
    "repetition, frequency, presence": {
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
    },
    "DRY": {"dry_multiplier": 0.8, "dry_breakers": Breakers((), {11: ((),)})},
}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=50_288, metavar="V")
    parser.add_argument("--history", type=int, nargs="+", default=[2048, 8192], metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=40, help="rows a round")
    return parser.parse_args()


def rows(vocab: int) -> dict[str, np.ndarray]:
    """One row f32[V] of each kind."""
    rng = np.random.default_rng(0)
    text = 18 - 1.5 * np.log1p(rng.permutation(vocab)) + 0.2 * rng.standard_normal(vocab)
    flat = 0.3 * rng.standard_normal(vocab)
    return {"text": text.astype(np.float32), "flat": flat.astype(np.float32)}


def definition(row: np.ndarray, params: SamplingParams, uniform: float) -> int:
    """One token by the definition: float64, the whole row sorted, no bounds."""
    logits = row.astype(np.float64)
    if params.greedy:
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()) / params.temperature)
    ranked = np.arange(logits.size)
    if params.top_k or params.top_p < 1:
        ranked = np.argsort(-logits, kind="stable")
    if params.top_k:
        ranked = ranked[: params.top_k]
    if params.top_p < 1:
        cdf = np.cumsum(weights[ranked])
        ranked = ranked[: int(cdf.searchsorted(params.top_p * cdf[-1])) + 1]
    if params.min_p > 0:
        ranked = ranked[weights[ranked] >= params.min_p]
    ids = np.sort(ranked)
    cdf = np.cumsum(weights[ids])
    return int(ids[min(cdf.searchsorted(uniform * cdf[-1], "right"), len(ids) - 1)])


def turns(calls: list[Callable[[], object]], rounds: int, count: int) -> list[np.ndarray]:
    """Microseconds a call, f64[rounds] for each of `calls`, which take turns."""
    times = np.empty((len(calls), rounds))
    for call in calls:
        call()
    for i in range(rounds):
        for j, call in enumerate(calls):
            began = time.thread_time()
            for _ in range(count):
                call()
            times[j, i] = (time.thread_time() - began) / count * 1e6
    return list(times)


def spread(times: np.ndarray) -> str:
    """Median (first to third quartile)."""
    low, middle, high = np.percentile(times, [25, 50, 75])
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def chains(args: argparse.Namespace) -> Iterator[dict[str, str]]:
    """A line for every chain and kind of row."""
    for kind, row in rows(args.vocab).items():
        for name, params in CHAINS.items():
            sampler, rng = Sampler(params), np.random.default_rng(1)

            def fast(sampler: Sampler = sampler, row: np.ndarray = row) -> int:
                return sampler.sample(row)

            def slow(
                params: SamplingParams = params,
                row: np.ndarray = row,
                rng: np.random.Generator = rng,
            ) -> int:
                return definition(row, params, rng.random())

            ours, plain = turns([fast, slow], args.rounds, args.calls)
            yield {
                "row": kind,
                "chain": name,
                "µs a row": spread(ours),
                "definition µs": spread(plain),
                "ratio": f"{np.median(plain / ours):.1f}",
            }


def penalties(args: argparse.Namespace) -> Iterator[dict[str, str]]:
    """What penalties add to top-k 40 over a history, paired with top-k 40 alone."""
    row = rows(args.vocab)["text"]
    bare = Sampler(SamplingParams(0.8, top_k=40, seed=1))
    both = {key: value for fields in PENALTIES.values() for key, value in fields.items()}
    for size in args.history:
        rng = np.random.default_rng(2)
        histories = {
            "mixed": (rng.zipf(1.3, size) % args.vocab).tolist(),
            "one token": [7] * size,
        }
        for kind, history in histories.items():
            for name, fields in (PENALTIES | {"all": both}).items():
                sampler = Sampler(SamplingParams(0.8, top_k=40, seed=1, **fields), history)
                with_them, without = turns(
                    [lambda s=sampler: s.sample(row), lambda: bare.sample(row)],
                    args.rounds,
                    args.calls,
                )
                yield {
                    "history": f"{size} {kind}",
                    "penalties": name,
                    "µs a row": spread(with_them),
                    "of these added": f"{np.median(with_them - without):.1f}",
                }


def main() -> None:
    """Print the tables."""
    args = arguments()
    print(describe(machine()))
    print(f"\nvocabulary {args.vocab}, {args.rounds} rounds of {args.calls} rows\n")
    print(table(list(chains(args))))
    print()
    print(table(list(penalties(args))))
    row = rows(args.vocab)["text"]
    (times,) = turns([lambda: logprobs(row, 5, 5)], args.rounds, args.calls)
    print(f"\nlogprobs of 5: {spread(times)} µs a row")


if __name__ == "__main__":
    main()
