"""Train the SQL graph: all its nodes, or those that are named.

    python -m examples.sql_agent.train_graph --agents 'write|rewrite'
    python -m examples.sql_agent.train_graph --spider spider_data

The graph is `graph.py`, unchanged. What belongs to the questions and the model is a `Setting`; the rest is the same for
all of them.
"""

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import lightning_rl as lrl
from lightning_rl.langgraph import GraphAgent, agent_of

from . import spider
from .agent import MAX_TOKENS
from .data import make
from .graph import SHORT, Prompts, look, sql_graph
from .queries import same_answer

Task = dict[str, str]


@dataclass(frozen=True)
class Setting:
    """Questions, the prompts by which a model is asked about them, and that model's configuration.

    `tasks` has the sets `train`, `tuning` and `heldout`; `config` is what `lrl.PPO` takes; `look` runs a query on a
    database and says what the model sees of its result.
    """

    tasks: Mapping[str, Sequence[Task]]
    prompts: Prompts
    config: Mapping[str, Any]
    look: Callable[[str, str], str] = look

    def with_config(self, values: Mapping[str, Any], overrides: Sequence[str] = ()) -> "Setting":
        """The same with other values, by their keys, and by texts: `data.train_batch_size=8`, which win."""
        config = OmegaConf.create(dict(self.config))
        for key, value in values.items():
            OmegaConf.update(config, key, value)
        config.merge_with_dotlist(list(overrides))
        plain: Any = OmegaConf.to_container(config)
        return replace(self, config=plain)


CONFIG: dict[str, Any] = {
    "data": {"train_batch_size": 16, "max_prompt_length": 320, "max_response_length": MAX_TOKENS},
    "actor_rollout_ref": {
        "model": {"path": str(Path(__file__).parent / "graph_checkpoint")},
        "actor": {
            "ppo_mini_batch_size": 4,
            "ppo_max_token_len_per_gpu": 2048,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.28,
            "optim": {"lr": 3e-4, "lr_warmup_steps": 5, "betas": [0.9, 0.95]},
        },
        "rollout": {"n": 16, "max_model_len": 384, "val_kwargs": {"temperature": 1.0}},
    },
    # Sampler and trainer agree to 1e-5 here, so the sampler's log probabilities serve as the old ones.
    "algorithm": {"rollout_correction": {"bypass_mode": True}},
    "trainer": {"total_training_steps": 24, "test_freq": 8},
}


def small(folder: Path) -> Setting:
    """The bundled databases, which are made in `folder`, and the bundled model."""
    return Setting(make(folder), SHORT, CONFIG)


def of_spider(folder: Path) -> Setting:
    """Spider's questions in `folder`, and the settings of Agent-lightning's tutorial. Raises spider.BrokenFolder."""
    return Setting(spider.sets(folder), spider.PROMPTS, spider.CONFIG, spider.look)


def right(task: Task, query: str) -> bool:
    """Whether a query gives what the right one gives: on all of its test suite, where the task has one."""
    return spider.matches(task, query) if "suite" in task else same_answer(task["database"], query, task["gold"])


def reward(task: Task, state: Mapping[str, Any]) -> float:
    """1.0 when the last query is right, else 0.0."""
    return float(right(task, state["query"]))


def agent(setting: Setting) -> GraphAgent:
    """The graph as an agent: each rollout builds it anew with a model of its own."""
    return agent_of(functools.partial(sql_graph, prompts=setting.prompts, look=setting.look), reward=reward)


def train(
    setting: Setting,
    run_dir: Path,
    *,
    agents: str | None = None,
    seed: int = 0,
    steps: int | None = None,
    validate_on: str = "heldout",
) -> lrl.PPO:
    """Train in `run_dir`; the algorithm with its `history` of metrics.

    Args:
        setting: what is trained on what.
        run_dir: the run folder, made when missing.
        agents: a regular expression; only calls of nodes whose whole name it matches are trained. By default as the
            setting says, else all.
        seed: of the order of the tasks.
        steps: of training; by default the setting's.
        validate_on: the set that `val/reward` is of.
    """
    algorithm, trainer = setting.config.get("algorithm", {}), setting.config["trainer"]
    config = {
        **setting.config,
        "data": {**setting.config["data"], "seed": seed},
        "algorithm": algorithm if agents is None else {**algorithm, "train_agents": agents},
        "trainer": trainer if steps is None else {**trainer, "total_training_steps": steps},
    }
    ppo = lrl.PPO(config)
    trainer = lrl.Trainer(agent(setting), run_dir=run_dir)
    trainer.fit(ppo, setting.tasks["train"], val_dataset=setting.tasks[validate_on])
    return ppo


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description="Train the SQL graph.")
    parser.add_argument("--agents", help="a regular expression of the nodes that are trained; all by default")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path, default=Path("runs") / "sql_graph")
    parser.add_argument("--spider", type=Path, help="train on Spider, in this folder, instead of the bundled questions")
    parser.add_argument("--model", help="a folder or a model id of the hub, instead of the setting's model")
    parser.add_argument("--engine", choices=("embedded", "vllm"), help="what samples; with --spider vllm by default")
    parser.add_argument("--python", help="the interpreter that has vLLM; by default this one")
    parser.add_argument("overrides", nargs="*", help="values of docs/config.md: data.train_batch_size=8")
    arguments = parser.parse_args()
    named = {
        "actor_rollout_ref.model.path": arguments.model,
        "actor_rollout_ref.rollout.name": arguments.engine,
        "actor_rollout_ref.rollout.python": arguments.python,
    }
    try:
        setting = of_spider(arguments.spider) if arguments.spider else small(arguments.run_dir / "data")
    except spider.BrokenFolder as error:
        parser.error(str(error))
    train(
        setting.with_config({key: value for key, value in named.items() if value}, arguments.overrides),
        arguments.run_dir,
        agents=arguments.agents,
        seed=arguments.seed,
        steps=arguments.steps,
    )


if __name__ == "__main__":
    main()
