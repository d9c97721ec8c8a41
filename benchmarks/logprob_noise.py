"""How far 16 bits keep two logprobs of one token apart: engine and trainer against float32, and against each other.

    python -m benchmarks.logprob_noise --model FOLDER [--engine vllm|sglang|none] [--prompts 64] [--tokens 48]

Answers are sampled at temperature 1 (by the engine, or by transformers in float32 with `--engine none`). Their logprobs
are then computed by transformers in float32 (the truth), and in bfloat16 and float16 with the head in the same and with
it in float32; an engine runs in both too. A gate on the mean difference between engine and trainer cannot ask for less
than what two such computations of the same model differ by.
"""

import argparse
import json
import os
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpost.platform import platform

DTYPES = ("bfloat16", "float16")
Answer = tuple[list[int], list[float]]  # sampled ids, and their logprobs where an engine sampled
PROMPT = "Answer with only the final number. {} + {} - {} = ?"


def prompts(model: str, count: int, seed: int) -> list[list[int]]:
    """Token ids of `count` sums in the model's chat form (plain where it has none)."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    numbers = torch.randint(1, 99, (count, 3), generator=torch.Generator().manual_seed(seed)).tolist()
    texts = [PROMPT.format(*triple) for triple in numbers]
    if tokenizer.chat_template is None:
        return [tokenizer(text)["input_ids"] for text in texts]
    messages = [[{"role": "user", "content": text}] for text in texts]
    return [tokenizer.apply_chat_template(m, add_generation_prompt=True)["input_ids"] for m in messages]


def by_vllm(model: str, dtype: str, ids: list[list[int]], num_tokens: int, **arguments: Any) -> list[Answer]:
    """Sampled in `dtype`."""
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # as in a run: else it wants a compiler at start
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, gpu_memory_utilization=0.3, max_model_len=1024, disable_log_stats=True, **arguments)
    params = SamplingParams(temperature=1.0, max_tokens=num_tokens, logprobs=0, detokenize=False)
    answers = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": i} for i in ids], params, use_tqdm=False)]
    return [
        (list(a.token_ids), [step[t].logprob for step, t in zip(a.logprobs, a.token_ids, strict=True)]) for a in answers
    ]


def by_sglang(model: str, dtype: str, ids: list[list[int]], num_tokens: int, **arguments: Any) -> list[Answer]:
    """Sampled in `dtype`."""
    import sglang

    engine = sglang.Engine(
        model_path=model, dtype=dtype, mem_fraction_static=0.3, skip_tokenizer_init=True,
        disable_piecewise_cuda_graph=True, **arguments,
    )  # fmt: skip
    params = {"temperature": 1.0, "max_new_tokens": num_tokens, "ignore_eos": True}
    outputs = engine.generate(input_ids=ids, sampling_params=params, return_logprob=True)
    engine.shutdown()
    pairs = [[(t, p) for p, t, *_ in o["meta_info"]["output_token_logprobs"]] for o in outputs]
    return [([t for t, _ in pair], [p for _, p in pair]) for pair in pairs]


def by_transformers(model: str, ids: list[list[int]], num_tokens: int) -> list[Answer]:
    """Sampled in float32; logprobs are left to `scores`."""
    device = "cpu" if platform().kind == "cpu" else "cuda"
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    answers = []
    for prompt in ids:
        batch = torch.tensor([prompt], device=device)
        out = net.generate(batch, do_sample=True, top_k=0, temperature=1.0, max_new_tokens=num_tokens)
        answers.append((out[0, len(prompt) :].tolist(), []))
    return answers


@torch.no_grad()
def scores(model: str, dtype: torch.dtype, sequences: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    """Logprobs of the answers with the head in `dtype` and in float32, and the entropy in nats, each float32 `[N]`."""
    device = "cpu" if platform().kind == "cpu" else "cuda"
    net = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device)
    found: dict[str, list[Tensor]] = {"own_head": [], "float32_head": [], "entropy": []}
    for prompt, answer in sequences:
        batch = torch.tensor([prompt + answer], device=device)
        hidden = net.base_model(batch).last_hidden_state[0, len(prompt) - 1 : -1]
        targets = batch[0, len(prompt) :, None]
        weight = net.get_output_embeddings().weight
        for name, logits in {"own_head": hidden @ weight.T, "float32_head": hidden.float() @ weight.float().T}.items():
            logs = logits.float().log_softmax(-1)
            found[name].append(logs.gather(1, targets).squeeze(1).cpu())
        found["entropy"].append(-(logs.exp() * logs).sum(-1).cpu())
    return {name: torch.cat(parts) for name, parts in found.items()}


def differences(model: str, dtype: str, engine: str, ids: list[list[int]], answers: list[Answer]) -> dict[str, Tensor]:
    """`<computation> - <computation>` -> difference of the logprobs, float32 `[N]`; and the `entropy`."""
    sequences = [(prompt, answer) for prompt, (answer, _) in zip(ids, answers, strict=True)]
    truth, half = scores(model, torch.float32, sequences), scores(model, getattr(torch, dtype), sequences)
    columns = {"trainer": half["own_head"], "trainer, head in float32": half["float32_head"]}
    rows = {f"{name} - float32": column - truth["own_head"] for name, column in columns.items()}
    if engine != "none":
        sampled = torch.tensor([p for _, logprobs in answers for p in logprobs])
        rows[f"{engine} - float32"] = sampled - truth["own_head"]
        rows |= {f"{engine} - {name}": sampled - column for name, column in columns.items()}
    return rows | {"entropy": truth["entropy"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", choices=["vllm", "sglang", "none"], default="vllm")
    parser.add_argument("--engine-arguments", type=json.loads, default={}, help="JSON, passed to the engine")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    ids = prompts(args.model, args.prompts, args.seed)
    if args.engine == "none":
        torch.manual_seed(args.seed)
        sampled = dict.fromkeys(DTYPES, by_transformers(args.model, ids, args.tokens))
    else:
        sample = {"vllm": by_vllm, "sglang": by_sglang}[args.engine]
        sampled = {dtype: sample(args.model, dtype, ids, args.tokens, **args.engine_arguments) for dtype in DTYPES}
    found = {dtype: differences(args.model, dtype, args.engine, ids, sampled[dtype]) for dtype in DTYPES}
    entropies = {dtype: rows.pop("entropy") for dtype, rows in found.items()}
    figures = {
        dtype: {
            name: [float(f"{row.abs().mean():.4g}"), float(f"{row.abs().median():.4g}")] for name, row in rows.items()
        }
        for dtype, rows in found.items()
    }
    about = "; ".join(dict.fromkeys(f"{len(e)} tokens, entropy {e.mean():.2f} nats" for e in entropies.values()))
    print(f"| {about} |{''.join(f' {dtype}: mean | median |' for dtype in DTYPES)}\n|---|{'---|---|' * len(DTYPES)}")
    for name in figures[DTYPES[0]]:
        print(f"| {name} |" + "".join(f" {mean} | {median} |" for mean, median in (figures[d][name] for d in DTYPES)))
    entropy = {dtype: e.mean().item() for dtype, e in entropies.items()}
    print(json.dumps({"entropy": entropy, "mean_median": figures}))


if __name__ == "__main__":
    main()
