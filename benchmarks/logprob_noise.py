"""How far bfloat16 itself keeps two logprobs of one token apart: each engine against float32, and against the other.

    python -m benchmarks.logprob_noise --model FOLDER [--engine vllm|sglang|none] [--prompts 64] [--tokens 48]

Answers are sampled at temperature 1 (by the engine, or by transformers in float32 with `--engine none`). Their logprobs
are then computed by transformers in float32 (the truth), in bfloat16 with logits in bfloat16, and in bfloat16 with the
head in float32. A gate on the mean difference between engine and trainer cannot ask for less than what two bfloat16
computations of the same model differ by.
"""

import argparse
import json
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpost.platform import platform

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


def by_vllm(model: str, ids: list[list[int]], num_tokens: int, **arguments: Any) -> list[tuple[list[int], list[float]]]:
    """Sampled ids and their logprobs."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype="bfloat16", gpu_memory_utilization=0.3, max_model_len=1024, disable_log_stats=True, **arguments
    )
    params = SamplingParams(temperature=1.0, max_tokens=num_tokens, logprobs=0, detokenize=False)
    answers = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": i} for i in ids], params, use_tqdm=False)]
    return [
        (list(a.token_ids), [step[t].logprob for step, t in zip(a.logprobs, a.token_ids, strict=True)]) for a in answers
    ]


def by_sglang(
    model: str, ids: list[list[int]], num_tokens: int, **arguments: Any
) -> list[tuple[list[int], list[float]]]:
    """Sampled ids and their logprobs."""
    import sglang

    engine = sglang.Engine(
        model_path=model, dtype="bfloat16", mem_fraction_static=0.3, skip_tokenizer_init=True,
        disable_piecewise_cuda_graph=True, **arguments,
    )  # fmt: skip
    params = {"temperature": 1.0, "max_new_tokens": num_tokens, "ignore_eos": True}
    outputs = engine.generate(input_ids=ids, sampling_params=params, return_logprob=True)
    engine.shutdown()
    pairs = [[(t, p) for p, t, *_ in o["meta_info"]["output_token_logprobs"]] for o in outputs]
    return [([t for t, _ in pair], [p for _, p in pair]) for pair in pairs]


def by_transformers(model: str, ids: list[list[int]], num_tokens: int) -> list[tuple[list[int], list[float]]]:
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
    sample = {"vllm": by_vllm, "sglang": by_sglang, "none": by_transformers}[args.engine]
    answers = sample(args.model, ids, args.tokens, **args.engine_arguments)
    sequences = [(prompt, answer) for prompt, (answer, _) in zip(ids, answers, strict=True)]
    truth = scores(args.model, torch.float32, sequences)
    half = scores(args.model, torch.bfloat16, sequences)
    columns = {"trainer": half["own_head"], "trainer, head in float32": half["float32_head"]}
    if args.engine != "none":
        columns = {args.engine: torch.tensor([p for _, logprobs in answers for p in logprobs]), **columns}
    rows = {f"{name} - float32": column - truth["own_head"] for name, column in columns.items()}
    if args.engine != "none":
        rows |= {f"{args.engine} - {name}": columns[args.engine] - columns[name] for name in list(columns)[1:]}
    figures = {
        name: [round(row.abs().mean().item(), 5), round(row.abs().median().item(), 5)] for name, row in rows.items()
    }
    print(
        f"| {len(truth['entropy'])} tokens, entropy {truth['entropy'].mean():.2f} nats | mean | median |\n|---|---|---|"
    )
    for name, (mean, median) in figures.items():
        print(f"| {name} | {mean} | {median} |")
    print(json.dumps({"entropy": truth["entropy"].mean().item(), "mean_median": figures}))


if __name__ == "__main__":
    main()
