"""Every configuration key: its type, its default and its effect, each written once, under verl's names.

Defaults, validation, typed access and `docs/config.md` all come from these classes. A key either has an effect, or it
is `no_effect`, with the reason.
"""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from lightning_rl.config.otlp_endpoint import traces_url
from lightning_rl.errors import Explained

Positive = Annotated[int, Meta(ge=1)]
Size = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Above0 = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Seed = Annotated[int, Meta(ge=0, le=2**53)]
Files = str | list[str] | None
PolicyName = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]
Host = Annotated[str, Meta(pattern=r"^([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$")]


def effect(text: str) -> Meta:
    """What the key does."""
    return Meta(description=text)


def no_effect(because: str) -> Meta:
    """The key is accepted so that configurations of verl and Agent-lightning work unchanged."""
    return Meta(description=because, extra={"no_effect": True})


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of keys."""


class Data(Section, frozen=True):
    """Tasks, and the lengths of what is trained."""

    train_files: Annotated[Files, effect("tasks to learn from, where `fit` is given no dataset: a file or a list")] = (
        None
    )
    val_files: Annotated[Files, effect("tasks to report on, where `fit` is given no validation dataset")] = None
    tune_files: Annotated[
        Files, effect("tasks that the best checkpoint and early stopping go by, where PPO is given no tune_dataset")
    ] = None
    train_batch_size: Annotated[Positive, effect("tasks per step")] = 32
    max_prompt_length: Annotated[
        Positive, effect("with max_response_length: tokens of the longest row that is trained; longer are `overlong`")
    ] = 1024
    max_response_length: Annotated[Positive, effect("tokens of one call, at most")] = 512
    apply_chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        effect("verl's other name of `actor_rollout_ref.rollout.multi_turn.chat_template_kwargs`"),
    ] = None
    overlong: Annotated[
        Literal["drop_row", "drop_rollout", "truncate_left", "truncate_response"],
        effect(
            "a row that is too long: left out; left out with its whole rollout; its oldest or newest tokens cut off"
        ),
    ] = "drop_row"
    filter_overlong_prompts: Annotated[
        bool,
        effect(
            "leave out tasks whose first prompt has more than max_prompt_length tokens; known before a rollout where "
            "agent loops run (`rollout.agent.default_agent_loop`), of the built-in ones"
        ),
    ] = False
    train_max_samples: Annotated[
        Annotated[int, Meta(ge=-1)],
        effect("take so many of the training tasks: the first, or with shuffle any, by seed; -1 or 0: all"),
    ] = -1
    val_max_samples: Annotated[Annotated[int, Meta(ge=-1)], effect("the same of the validation tasks")] = -1
    shuffle: Annotated[bool, effect("another order of tasks every epoch")] = True
    seed: Annotated[Seed, effect("order of tasks and seeds of sampling")] = 0

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest row that is trained."""
        return self.max_prompt_length + self.max_response_length


class Lora(Section, frozen=True):
    """How engines are given an adapter."""

    merge: Annotated[
        bool | None,
        effect(
            "true: an engine gets the weights that the adapter changes, with it; false: the adapter alone, some MB, "
            "beside the weights that it was started with (docs/engines.md); null: true for one policy, and false for "
            "several over one model"
        ),
    ] = None


class Model(Section, frozen=True):
    """The policy."""

    path: Annotated[
        str | None,
        effect("a Hugging Face folder, or a model id of the hub; null: the tutorial's small model, to try things out"),
    ] = None
    chat_template: Annotated[
        str | None,
        effect(
            "for a model that has none, or in the place of its own: a file with a Jinja template, or the folder or id "
            "of a model whose template is taken; checkpoints have it too"
        ),
    ] = None
    attn_implementation: Annotated[
        Literal["sdpa", "eager", "flash_attention_2"] | None,
        effect(
            "how the trainer, and the embedded engine, compute attention; null: sdpa, and eager for models that have "
            "no other, as where scores are capped (Gemma 2)"
        ),
    ] = None
    override_config: Annotated[
        dict[str, Any],
        effect(
            "values that replace those of the model's config.json, by name: `{max_position_embeddings: 65536}`; "
            "trainer, engines and checkpoints have them"
        ),
    ] = field(default_factory=dict)
    trust_remote_code: Annotated[
        bool,
        effect(
            "run the Python files of the model's folder, for one that `transformers` has no class for, in the trainer, "
            "its workers and vLLM: as any program of yours, so read them first"
        ),
    ] = False
    enable_gradient_checkpointing: Annotated[
        bool, effect("compute activations twice instead of keeping them: less memory, more time")
    ] = False
    use_remove_padding: Annotated[
        bool,
        effect(
            "tokens that rows begin with alike are computed once, where the model allows it; false: every row whole"
        ),
    ] = True
    lora_rank: Annotated[
        Size, effect("train adapters of this rank (`peft`) instead of the weights; 0: the weights")
    ] = 0
    lora_alpha: Annotated[Above0, effect("an adapter counts lora_alpha / lora_rank times")] = 16
    target_modules: Annotated[
        str | list[str], effect("what gets an adapter: names of modules, a regex of them, or all-linear")
    ] = "all-linear"
    exclude_modules: Annotated[
        str | list[str] | None,
        effect("what gets none of those: names of modules, or a regex of them; null: all get one"),
    ] = None
    lora_adapter_path: Annotated[
        str | None, effect("a `peft` folder whose adapter training begins with; null: one that changes nothing")
    ] = None
    load_in_4bit: Annotated[
        bool,
        effect(
            "under an adapter: the trainer holds linear layers in 4 bits (QLoRA, NF4 of `bitsandbytes`); "
            "engines and exported models have the same numbers whole; in one process"
        ),
    ] = False
    lora_export: Annotated[
        Literal["merged", "adapter"],
        effect("the final model: a whole one with the adapter in its weights, or the adapter alone"),
    ] = "merged"
    lora: Lora = Lora()


class Fsdp(Section, frozen=True):
    """Number formats of training, and where parameters are kept between their uses."""

    model_dtype: Annotated[Literal["fp32", "bf16"], effect("how parameters are held")] = "fp32"
    dtype: Annotated[
        Literal["float32", "bfloat16"], effect("in what matrices are multiplied (autocast); losses are float32 always")
    ] = "float32"
    param_offload: Annotated[
        bool, effect("weights of training wait in main memory while they are not used; on a CPU they are there anyway")
    ] = False
    optimizer_offload: Annotated[
        bool, effect("the optimizer's state waits in main memory between updates; on a CPU it is there anyway")
    ] = False
    fsdp_size: Annotated[
        Annotated[int, Meta(ge=-1)],
        effect(
            "of several workers: so many hold a model in shards together, and each such group holds a whole one "
            "(hybrid sharding); -1: all of them"
        ),
    ] = -1
    reshard_after_forward: Annotated[
        bool,
        effect(
            "of several workers: a layer gives up the weights it gathered behind its forward pass, and gathers them "
            "again for the backward pass; false: it keeps them, which takes the room of the whole model and saves time"
        ),
    ] = True
    ulysses_sequence_parallel_size: Annotated[
        Positive | None,
        effect(
            "of several workers: so many compute a row together, each a part of its tokens and of the heads of "
            "attention, for rows that are too long for one; tokens per micro-batch stay those of each"
        ),
    ] = 1


class RefFsdp(Fsdp, frozen=True):
    """The same of the reference model, where it is one of its own (with LoRA it is the policy without its adapter)."""

    optimizer_offload: Annotated[bool, no_effect("the reference is not trained, so it has no optimizer")] = False
    ulysses_sequence_parallel_size: Annotated[
        Positive | None, effect("of the reference and of teachers; null: as the policy")
    ] = None


class Optim(Section, frozen=True):
    """The optimizer and its schedule."""

    optimizer: Annotated[str, effect("a class of `optimizer_impl`")] = "AdamW"
    optimizer_impl: Annotated[str, effect("the module that it is taken from")] = "torch.optim"
    override_optimizer_config: Annotated[
        dict[str, Any] | None, effect("more of its arguments, by name; they win over the other keys")
    ] = None
    lr: Annotated[
        Above0 | None,
        effect(
            "learning rate; null: by the model, 1e-6 for 7 billion parameters, more for fewer (5e-6 for 0.6 billion, "
            "3e-4 for a million), ten times as much for an adapter (`lora_rank`); the run's config.yaml then has it"
        ),
    ] = None
    lr_warmup_steps: Annotated[
        Annotated[int, Meta(ge=-1)], effect("training steps of linear warm-up; -1: as lr_warmup_steps_ratio says")
    ] = -1
    lr_warmup_steps_ratio: Annotated[Share, effect("the same as a share of the run's training steps")] = 0.0
    lr_scheduler_type: Annotated[
        Literal["constant", "linear", "cosine"],
        effect("after the warm-up: constant, or in a line or a cosine down to min_lr_ratio x lr"),
    ] = "constant"
    min_lr_ratio: Annotated[Share, effect("where line and cosine end, behind the last step, as a share of lr")] = 0.0
    num_cycles: Annotated[Above0, effect("waves of the cosine; 0.5: from the top to the bottom, once")] = 0.5
    betas: Annotated[tuple[Share, Share], effect("Adam's averages, where the optimizer has any")] = (0.9, 0.999)
    weight_decay: Annotated[NotNegative, effect("the optimizer's decay")] = 0.01


class CriticOptim(Optim, frozen=True):
    """The critic's optimizer and its schedule."""

    lr: Annotated[Above0, effect("learning rate")] = 1e-5


class PolicyLossConfig(Section, frozen=True):
    """The policy's loss (`docs/algorithms.md`)."""

    loss_mode: Annotated[
        str,
        effect(
            "vanilla, dppo_tv, dppo_kl, gspo, sapo, gpg, clip_cov, kl_cov, geo_mean, dro, cispo, reinforce, ppo_clip, "
            "bypass_mode (what rollout_correction.loss_type says), or one of your own in `rl.losses.LOSSES`"
        ),
    ] = "vanilla"
    clip_cov_ratio: Annotated[
        Annotated[float, Meta(gt=0, le=1)], effect("clip_cov: the share of tokens that lose their loss")
    ] = 0.0002
    clip_cov_lb: Annotated[float, effect("clip_cov: the covariance above which they may")] = 1.0
    clip_cov_ub: Annotated[float, effect("clip_cov: the covariance below which they may")] = 5.0
    kl_cov_ratio: Annotated[
        Annotated[float, Meta(gt=0, le=1)], effect("kl_cov: the share of tokens that are penalised")
    ] = 0.0002
    ppo_kl_coef: Annotated[NotNegative, effect("kl_cov: the weight of their penalty")] = 0.1
    dro_beta: Annotated[Above0 | None, effect("dro: the weight of the squared log ratio; dro needs it")] = None


class ActorSection(Section, frozen=True):
    """The update of the policy."""

    ppo_mini_batch_size: Annotated[Positive, effect("tasks per optimizer step (times rollout.n rollouts)")] = 32
    ppo_micro_batch_size_per_gpu: Annotated[
        Positive | None, effect("rows computed at once, where use_dynamic_bsz is false")
    ] = None
    use_dynamic_bsz: Annotated[
        bool | None,
        effect("micro-batches by tokens, not by rows; null: unless ppo_micro_batch_size_per_gpu is given"),
    ] = None
    ppo_max_token_len_per_gpu: Annotated[
        Positive, effect("padded tokens computed at once, where micro-batches are by tokens")
    ] = 8192
    ppo_epochs: Annotated[Positive, effect("passes over a step's rows")] = 1
    clip_ratio: Annotated[Above0, effect("how far the probability ratio may go from 1")] = 0.2
    clip_ratio_low: Annotated[Above0 | None, effect("the same downwards; null: clip_ratio")] = None
    clip_ratio_high: Annotated[Above0 | None, effect("the same upwards; null: clip_ratio")] = None
    clip_ratio_c: Annotated[Annotated[float, Meta(gt=1)], effect("dual clip, for negative advantages")] = 3.0
    loss_agg_mode: Annotated[
        Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"],
        effect("how token losses become one number; *seq* is a whole rollout"),
    ] = "token-mean"
    loss_scale_factor: Annotated[
        Above0 | None,
        effect(
            "the divisor of seq-mean-token-sum-norm; null: data.max_response_length, as in verl, which pads rows to it"
        ),
    ] = None
    tau_pos: Annotated[Above0, effect("loss_mode sapo: how steep its gate is where the advantage is positive")] = 1.0
    tau_neg: Annotated[Above0, effect("loss_mode sapo: the same elsewhere")] = 1.05
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    entropy_coeff: Annotated[float, effect("weight of the entropy bonus")] = 0.0
    grad_clip: Annotated[Above0, effect("largest norm of a gradient")] = 1.0
    shuffle: Annotated[bool, effect("mini-batches in another order in every pass")] = False
    use_kl_loss: Annotated[
        bool, effect("the loss has a penalty for the distance from the reference: the model that training began with")
    ] = False
    kl_loss_coef: Annotated[NotNegative, effect("the weight of that penalty")] = 0.001
    kl_loss_type: Annotated[
        str, effect("its kind: k1, abs, k2, k3 (= kl, -, mse, low_var_kl), each also with a + for k2's gradient")
    ] = "low_var_kl"
    optim: Optim = field(default_factory=Optim)
    fsdp_config: Fsdp = field(default_factory=Fsdp)


class ValKwargs(Section, frozen=True):
    """Sampling of validation."""

    do_sample: Annotated[bool, effect("false: greedy, whatever the temperature")] = True
    temperature: Annotated[NotNegative, effect("0 is greedy")] = 0.0
    top_p: Annotated[TopP, effect("as in rollout")] = 1.0
    top_k: Annotated[Annotated[int, Meta(ge=-1)], effect("as in rollout")] = -1
    n: Annotated[Positive, effect("rollouts per validation task")] = 1


class RayActors(Section, frozen=True):
    """Runners as actors on the machines of a Ray cluster (`docs/runners.md`)."""

    address: Annotated[
        str | None,
        effect(
            "the cluster whose machines run the agents: auto (the one that is there), HOST:PORT, ray://HOST:PORT, or "
            "local (one for this run, on this machine); null: agents run in processes beside the trainer"
        ),
    ] = None
    num_actors: Annotated[
        Positive | None,
        effect("actors, among which the rollouts at once are divided; null: as many as the cluster has room for"),
    ] = None
    num_cpus: Annotated[Above0, effect("cores that an actor holds; it runs the agents in so many processes")] = 1.0
    num_gpus: Annotated[NotNegative, effect("GPUs that an actor holds, for agents that need one")] = 0.0
    resources: Annotated[
        dict[str, float] | None,
        effect("of Ray's own resources, what an actor holds: `{browser: 1}` puts it on machines that have it"),
    ] = None


class AgentRuns(Section, frozen=True):
    """How agents are run."""

    max_concurrent_rollouts: Annotated[
        Positive | None,
        effect(
            "at most so many rollouts run at once, where Trainer is given no n_runners; null: those of a step, 64 a "
            "core at most, and 64 in all where each is a process or starts a program. The engines' queues decide how "
            "many of them do. For agents that compute much themselves set twice the number of cores"
        ),
    ] = None
    timeout_seconds: Annotated[Above0 | None, effect("an attempt that takes longer has failed; null: no limit")] = 600.0
    max_attempts: Annotated[
        Positive, effect("tries at a rollout, where infrastructure fails; an agent's own failure is not tried again")
    ] = 3
    isolation: Annotated[
        Literal["thread", "process"],
        effect(
            "process: each rollout runs in a process of its own, which is killed with all that it started when its "
            "time is over; thread: many share a process, where Trainer is given no isolation (`docs/runners.md`)"
        ),
    ] = "thread"
    default_agent_loop: Annotated[
        str | None,
        effect(
            "the agent, where none is given: single_turn_agent, tool_agent, or a name of agent_loop_config_path. A "
            "task's `agent_name` chooses another; null: single_turn_agent, where agent_loop_config_path is given"
        ),
    ] = None
    agent_loop_config_path: Annotated[
        str | None,
        effect("a YAML file of loops of your own: a list of `name`, `_target_` (the class) and its arguments"),
    ] = None
    ray: RayActors = field(default_factory=RayActors)


class UserTurns(Section, frozen=True):
    """Who answers the policy as the user, where a loop has user turns (`docs/loops.md`)."""

    path: Annotated[
        str | None,
        effect(
            "a function of yours, module:name or path/to/file.py:name, sync or async: from the task and the messages "
            "to what the user says next, or None when they are done"
        ),
    ] = None
    model: Annotated[str | None, effect("one of `gateway.backends` that plays the user instead")] = None
    prompt: Annotated[
        str,
        effect("what that model is told it is; a task's `user_prompt` goes before it"),
    ] = (
        "You are the user of an assistant, and write what this user says next, nothing else. "
        "When what you wanted is done, answer ###DONE### alone."
    )
    done: Annotated[str, effect("what that model says when the user is done")] = "###DONE###"


class GraphConfig(Section, frozen=True):
    """What the graph is invoked with."""

    recursion_limit: Annotated[
        Positive | None, effect("nodes run at most in one rollout; null: the graph's own limit, else LangGraph's")
    ] = None


class Langgraph(Section, frozen=True):
    """A LangGraph graph as the agent (`docs/langgraph.md`)."""

    path: Annotated[
        str | None,
        effect(
            "the graph that is trained, where no agent is given: module:name, or path/to/file.py:name, of a compiled "
            "graph, a StateGraph, or a function that builds one; of path/to/file.py alone its `graph`, or its only one"
        ),
    ] = None
    graph_config: GraphConfig = field(default_factory=GraphConfig)


class MultiTurn(Section, frozen=True):
    """verl's own agent loops."""

    format: Annotated[str, no_effect("the renderer of the model knows how its tool calls are written")] = "hermes"
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        effect(
            "what the chat format is told besides the messages, `{enable_thinking: false}`, in every prompt of the "
            "run; the same as `data.apply_chat_template_kwargs`, with which it must agree"
        ),
    ] = None
    max_assistant_turns: Annotated[
        Positive | None, effect("of the loop tool_agent: answers of the policy, at most; null: no limit")
    ] = None
    max_user_turns: Annotated[
        Size | None,
        effect("of the loop tool_agent: how often the user speaks again, at most (tools are no users); null: no limit"),
    ] = None
    user: UserTurns = field(default_factory=UserTurns)
    langgraph: Langgraph = field(default_factory=Langgraph)
    tool_config_path: Annotated[
        str | None, effect("a YAML file of tools: classes with state, and MCP servers (`docs/agent-tools.md`)")
    ] = None
    function_tool_path: Annotated[
        Files, effect("Python files whose functions marked `@function_tool` are tools: a file, a module, or a list")
    ] = None
    max_parallel_calls: Annotated[
        Positive, effect("tool calls of one answer that run at once; the others run after them")
    ] = 1
    max_tool_response_length: Annotated[
        Positive | None, effect("of a tool's text the model reads so much, and a marker of what was cut; null: all")
    ] = 256
    tool_response_length_unit: Annotated[
        Literal["characters", "tokens"], effect("what max_tool_response_length counts")
    ] = "characters"
    tool_response_truncate_side: Annotated[
        Literal["left", "right", "middle"], effect("the part of a longer text that is cut")
    ] = "middle"


class Trace(Section, frozen=True):
    """Rollouts as traces of a tool for looking at them (`docs/rollout-trace.md`)."""

    backend: Annotated[
        Literal["mlflow", "otlp"] | None,
        effect(
            "where they go: to MLflow, as MLFLOW_TRACKING_URI says, else into mlflow.db of the run's folder; or to "
            "`otlp_endpoint`; null: nowhere"
        ),
    ] = None
    token2text: Annotated[bool, effect("calls have their prompt and response tokens as text, too")] = False
    max_samples_per_step_per_worker: Annotated[
        Positive | None,
        effect("tasks of a step, and of a validation, that are traced at most, each with all its rollouts; null: all"),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        effect(
            "of backend otlp: an OTLP/HTTP endpoint, `http://127.0.0.1:4318`; its key, if it wants one, comes from "
            "OTEL_EXPORTER_OTLP_HEADERS"
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.otlp_endpoint is not None:
            traces_url(self.otlp_endpoint, "config key actor_rollout_ref.rollout.trace.otlp_endpoint")


class EngineKwargs(Section, frozen=True):
    """Further flags of engines that are started."""

    vllm: Annotated[
        dict[str, Any] | None,
        effect("flags of `vllm serve` by name, `{block_size: 32}`; they win over those that other keys make"),
    ] = None


class RolloutSection(Section, frozen=True):
    """Sampling: the engine, and how agents run against it."""

    name: Annotated[
        Literal["embedded", "vllm", "sglang"],
        effect("the engine: ours, in the trainer's process, vLLM's servers, or SGLang's, which `server_urls` names"),
    ] = "embedded"
    python: Annotated[
        str | None, effect("of vLLM: the interpreter of the environment that has it; null: the trainer's own")
    ] = None
    server_urls: Annotated[
        list[str] | None,
        effect("servers that run already, started as `docs/engines.md` says; null: vLLM's are started by the run"),
    ] = None
    n: Annotated[Positive, effect("rollouts per task: the group")] = 8
    temperature: Annotated[Above0, effect("of training; replaces the agent's")] = 1.0
    top_p: Annotated[TopP, effect("the smallest set of tokens with this probability; 1: all")] = 1.0
    top_k: Annotated[Annotated[int, Meta(ge=-1)], effect("the most likely tokens; -1: all")] = -1
    ignore_eos: Annotated[
        bool, effect("a call goes on behind the model's end token, until it is as long as it may be: to measure speed")
    ] = False
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        effect("in what the engine computes; null: as the actor's parameters are held"),
    ] = None
    max_num_seqs: Annotated[Positive, effect("generations at once")] = 256
    response_length: Annotated[
        Positive | None,
        effect(
            "of agent loops: tokens of a trajectory after its first prompt, at most, sampled ones and those of tools "
            "and users; null: as many as the longest row that is trained has room for"
        ),
    ] = None
    max_model_len: Annotated[
        Positive | None,
        effect(
            "tokens of a sequence, prompt and answer; null: what the model was made for, of the embedded engine "
            "at most 2048 or, where that is more, data.max_prompt_length + data.max_response_length"
        ),
    ] = None
    num_threads: Annotated[
        Positive | None,
        effect(
            "cores of an engine on a CPU; null: of the embedded one all that torch takes, and half of them where a "
            "schedule has it sample while the trainer computes; of a vLLM server one"
        ),
    ] = None
    renderer: Annotated[str, effect("the chat format, by name; auto: by the model")] = "auto"
    history: Annotated[
        Literal["keep", "template"],
        effect("reasoning of earlier turns: kept, or dropped where the chat format does, which begins a new row"),
    ] = "keep"
    log_prob_micro_batch_size_per_gpu: Annotated[
        Positive | None,
        effect("rows at once where old log probabilities are recomputed; null: as in the update"),
    ] = None
    tensor_model_parallel_size: Annotated[
        Positive, effect("GPUs of one vLLM server; the embedded engine has one device, and refuses more")
    ] = 1
    data_parallel_size: Annotated[
        Positive, effect("vLLM servers, among which the gateway chooses; the embedded engine is one, and refuses more")
    ] = 1
    gpu_memory_utilization: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        effect("the share of a GPU's memory that a vLLM server takes; the embedded engine takes what it needs"),
    ] = 0.5
    enforce_eager: Annotated[
        bool, effect("vLLM compiles and captures nothing, as always on a CPU; the embedded engine never does")
    ] = False
    weight_transfer: Annotated[
        Literal["file", "ipc", "nccl"],
        effect(
            "how weights reach vLLM: by a file, or on GPUs by vLLM's own transfers, in memory on the same GPUs (`ipc`) "
            "or between them (`nccl`)"
        ),
    ] = "file"
    devices: Annotated[
        list[Size] | Literal["colocated", "apart"] | None,
        effect(
            "GPUs of the vLLM servers that a run starts, tensor_model_parallel_size for each in turn, as indices among "
            "those that the run sees; colocated: the trainer's first; apart: none of the trainer's; null: apart where "
            "there are enough, else colocated"
        ),
    ] = None
    free_cache_engine: Annotated[
        bool | None,
        effect(
            "vLLM on the trainer's GPU gives its memory back while the update runs; null: where they share one and "
            "the schedule is sync; on a CPU there is none to give"
        ),
    ] = None
    engine_kwargs: EngineKwargs = field(default_factory=EngineKwargs)
    agent: AgentRuns = field(default_factory=AgentRuns)
    multi_turn: MultiTurn = field(default_factory=MultiTurn)
    trace: Trace = field(default_factory=Trace)
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)


class Ref(Section, frozen=True):
    """The reference model."""

    log_prob_micro_batch_size_per_gpu: Annotated[
        Positive | None, effect("rows at once where its log probabilities are computed; null: as in the update")
    ] = None
    fsdp_config: RefFsdp = field(default_factory=RefFsdp)


class ActorRolloutRef(Section, frozen=True):
    """The policy: model, update, sampling, reference."""

    model: Model = field(default_factory=Model)
    actor: ActorSection = field(default_factory=ActorSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    ref: Ref = field(default_factory=Ref)


class CriticModel(Section, frozen=True):
    """The model that values are read from."""

    path: Annotated[
        str | None, effect("a Hugging Face folder, or a model id of the hub; null: the policy's, as training begins")
    ] = None
    trust_remote_code: Annotated[bool, effect("run the Python files of its folder, as of the policy")] = False
    enable_gradient_checkpointing: Annotated[bool, effect("as of the policy")] = False


class CriticSection(Section, frozen=True):
    """The model of what is to come, which `adv_estimator: gae` compares rewards with."""

    enable: Annotated[bool | None, effect("train one; null: where adv_estimator is gae")] = None
    shared_trunk: Annotated[
        bool,
        effect("values are read from the policy's own last layer and trained in its update: one model, less memory"),
    ] = False
    value_coef: Annotated[NotNegative, effect("of a shared trunk: the weight of the value loss in the policy's")] = 0.5
    model: CriticModel = field(default_factory=CriticModel)
    optim: CriticOptim = field(default_factory=CriticOptim)
    cliprange_value: Annotated[Above0, effect("how far values may go from the old ones in one training step")] = 0.5
    ppo_mini_batch_size: Annotated[
        Positive | None, effect("tasks per optimizer step (times rollout.n rollouts); null: as the actor's")
    ] = None
    ppo_micro_batch_size_per_gpu: Annotated[
        Positive | None, effect("rows computed at once, where use_dynamic_bsz is false")
    ] = None
    use_dynamic_bsz: Annotated[
        bool | None,
        effect("micro-batches by tokens, not by rows; null: unless ppo_micro_batch_size_per_gpu is given"),
    ] = None
    ppo_max_token_len_per_gpu: Annotated[
        Positive, effect("padded tokens computed at once, where micro-batches are by tokens")
    ] = 8192
    ppo_epochs: Annotated[Positive | None, effect("passes over a step's rows; null: as the actor's")] = None
    loss_agg_mode: Annotated[
        Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
        | None,
        effect("how losses of tokens become one number; null: as the actor's"),
    ] = None
    grad_clip: Annotated[Above0, effect("largest norm of a gradient")] = 1.0
    fsdp_config: Fsdp = field(default_factory=Fsdp)


class RolloutCorrection(Section, frozen=True):
    """What to do about a sampler that is not quite the trainer."""

    bypass_mode: Annotated[
        bool, effect("true: the sampler's log probabilities are the old ones; false: they are recomputed")
    ] = False
    loss_type: Annotated[
        Literal["ppo_clip", "reinforce"],
        effect(
            "the loss in bypass_mode, where loss_mode is vanilla or bypass_mode: the clip bounds the ratio to the "
            "sampler, or there is no clip, and the weights are those of rollout_is"
        ),
    ] = "ppo_clip"
    rollout_is: Annotated[
        Literal["token", "sequence", "geometric", "auto"] | None,
        effect(
            "importance weights, trainer to sampler: each token's, its rollout's product or geometric mean; null: 1; "
            "auto: token where trainer.schedule is off-policy and bypass_mode is false, else 1"
        ),
    ] = "auto"
    rollout_is_threshold: Annotated[
        float | str, effect("a number truncates weights; quoted bounds, '0.5_5.0', make those outside 0 (IcePop)")
    ] = 2.0
    rollout_is_batch_normalize: Annotated[bool, effect("divide the weights by their mean in the batch")] = False
    rollout_rs: Annotated[
        str | None,
        effect("criteria that all must let a token through, with commas: token_k1, seq_mean_k3, ...; null: none"),
    ] = None
    rollout_rs_threshold: Annotated[
        float | str | None,
        effect(
            "one for all or one for each criterion, with commas; k1: bounds of the ratio trainer to sampler, "
            "'0.5_2.0', or x for 1/x to x; k2 and k3: the largest divergence"
        ),
    ] = None
    rollout_token_veto_threshold: Annotated[
        Annotated[float, Meta(gt=0, lt=1)] | None,
        effect("a token with a smaller ratio, trainer to sampler, rejects its whole rollout; null: none does"),
    ] = None


class CreditConfig(Section, frozen=True):
    """Which calls a rollout's rewards reach (`docs/concepts/credit.md`)."""

    strategy: Annotated[
        Literal[
            "final",
            "last_call",
            "discounted",
            "per_step",
            "return_to_go",
            "per_agent",
            "leave_one_out",
            "counterfactual",
            "step_groups",
        ],
        effect("how rewards become the credit of calls; final: every call has the final reward"),
    ] = "final"
    weights: Annotated[
        dict[str, float] | None,
        effect("the final reward is this weighted sum of named ones; so is a call's; null: the one named `reward`"),
    ] = None
    function: Annotated[
        str | None,
        effect("a strategy of your own, module:name or path/to/file.py:name, instead of a named one"),
    ] = None
    step_weight: Annotated[
        NotNegative, effect("of step_groups: what the comparison at equal prompts counts, beside that of rollouts")
    ] = 1.0


class FilterGroups(Section, frozen=True):
    """DAPO's dynamic sampling (arXiv 2503.14476, section 3.2)."""

    enable: Annotated[
        bool, effect("train only groups whose rollouts differ in reward; roll out more tasks until there are enough")
    ] = False
    metric: Annotated[
        str,
        effect(
            "the reward that has to differ, by name; reward: what a rollout counts with, before penalties; acc: the "
            "same, where no reward is named so"
        ),
    ] = "reward"
    max_num_gen_batches: Annotated[
        Positive, effect("batches of tasks rolled out for one step, at most; then it trains what there is")
    ] = 10


class KlCtrl(Section, frozen=True):
    """The coefficient of the distance from the reference in rewards."""

    type: Annotated[Literal["fixed", "adaptive"], effect("it stays, or steers the distance to target_kl")] = "fixed"
    kl_coef: Annotated[NotNegative, effect("the coefficient, or where it begins")] = 0.001
    horizon: Annotated[Positive, effect("adaptive: rollouts over which it moves")] = 10000
    target_kl: Annotated[Above0, effect("adaptive: the distance per sampled token that it steers to")] = 0.1


PENALTIES = frozenset({"kl_penalty", "overlong_penalty"})  # named rewards that training gives


class AlgorithmSection(Section, frozen=True):
    """From rewards to advantages."""

    gamma: Annotated[
        Share,
        effect(
            "discount: per call, of the strategies discounted, return_to_go and step_groups; per sampled token, of the "
            "estimators gae and reinforce_plus_plus"
        ),
    ] = 1.0
    lam: Annotated[Share, effect("of gae: how far advantages trust rewards (1) rather than the critic (0)")] = 1.0
    credit: CreditConfig = field(default_factory=CreditConfig)
    groups_of_one: Annotated[
        Literal["zero", "raw", "drop"],
        effect("a rollout without others to compare it with: advantage 0, its credit as it is (as verl), or left out"),
    ] = "zero"
    min_successful_rollouts: Annotated[
        Size,
        effect(
            "a group with fewer rollouts whose agents ended well and have a reward is left out of training, counted "
            "as `few_successes`"
        ),
    ] = 0
    groups_without_variance: Annotated[
        Literal["keep", "drop"],
        effect("a group whose advantages are all 0: kept, so that it counts in the means of the loss, or left out"),
    ] = "keep"
    adv_estimator: Annotated[
        Literal[
            "gae",
            "grpo",
            "grpo_vectorized",
            "gdpo",
            "grpo_passk",
            "reinforce_plus_plus_baseline",
            "rloo",
            "rloo_vectorized",
            "opo",
            "reinforce_plus_plus",
            "remax",
            "gpg",
            "optimal_token_baseline",
            "tir_optimal_token_baseline",
        ],
        effect(
            "how advantages are estimated (`docs/algorithms.md`); gae trains a critic, remax asks for a greedy rollout "
            "of every task beside the others"
        ),
    ] = "grpo"
    gdpo_reward_keys: Annotated[
        list[str] | None, effect("of gdpo: the named rewards that are each compared with the group")
    ] = None
    gdpo_reward_weights: Annotated[
        list[float] | None, effect("of gdpo: the weight of each of gdpo_reward_keys; null: 1 each")
    ] = None
    norm_adv_by_std_in_grpo: Annotated[bool, effect("divide by the group's standard deviation")] = True
    agent_failure: Annotated[
        Literal["zero", "exclude"] | float,
        effect("the reward of a rollout whose agent failed or gave none: zero, a number, or left out of its group"),
    ] = "zero"
    train_agents: Annotated[
        str | None,
        effect("a regex: only calls of agents (URL tags) whose whole name it matches are trained; null: of all"),
    ] = None
    train_spans: Annotated[
        bool,
        effect(
            "train on calls that agents' own OpenTelemetry spans tell of with token ids, beside the gateway's; needs "
            "trainer.schedule=sync"
        ),
    ] = False
    filter_groups: FilterGroups = field(default_factory=FilterGroups)
    use_kl_in_reward: Annotated[
        bool, effect("rewards are lowered by kl_ctrl's coefficient times the distance from the reference")
    ] = False
    kl_penalty: Annotated[str, effect("the kind of that distance, as actor.kl_loss_type")] = "kl"
    kl_ctrl: KlCtrl = field(default_factory=KlCtrl)
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)

    @property
    def compared_rewards(self) -> dict[str, float]:
        """The named rewards that gdpo compares and agents give, with their weights; none under other estimators."""
        if self.adv_estimator != "gdpo":
            return {}
        names = self.gdpo_reward_keys or []
        weights = self.gdpo_reward_weights or [1.0] * len(names)
        return {name: weight for name, weight in zip(names, weights, strict=False) if name not in PENALTIES}


class DistillationLossConfig(Section, frozen=True):
    """The loss against a teacher (`rl.distillation`)."""

    loss_mode: Annotated[
        Literal[
            "k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k2+", "k3+", "low_var_kl+", "abs+",
            "forward_kl_topk", "forward_kl_tail", "reverse_kl_tail", "jsd_tail",
        ],
        effect(
            "an estimate by the sampled token (those of kl_loss_type), or a divergence over the teacher's topk most "
            "likely tokens: ..._tail counts all others as one class, forward_kl_topk leaves them out, as verl"
        ),
    ] = "k1"  # fmt: skip
    topk: Annotated[Positive, effect("the teacher's most likely tokens that forward_kl_topk and ..._tail compare")] = 32
    use_task_rewards: Annotated[
        bool, effect("false: the teacher's loss alone is minimised; rewards, entropy and the reference count nothing")
    ] = True
    distillation_loss_coef: Annotated[
        NotNegative, effect("what the teacher's loss counts beside the policy's, with use_task_rewards")
    ] = 1.0
    distillation_loss_coef_end: Annotated[
        NotNegative | None, effect("what it comes to in the last step, linearly from the first; null: it stays")
    ] = None
    loss_max_clamp: Annotated[
        Above0 | None, effect("a token's loss against the teacher is at most this far from 0; null: no bound")
    ] = None
    log_prob_min_clamp: Annotated[
        float | None, effect("of forward_kl_topk: log probabilities below count as this; null: as they are")
    ] = None
    use_policy_gradient: Annotated[
        bool, effect("the token's negative loss is its advantage in a clipped policy loss; false: a loss to minimise")
    ] = True
    gate: Annotated[
        Above0 | None,
        effect(
            "a token's loss counts sigmoid(gate * (log p - log q)) times: more where the teacher p finds it likelier "
            "than the policy q; null: every token counts alike"
        ),
    ] = None
    control_variate: Annotated[
        bool,
        effect(
            "of k1 with use_policy_gradient: adds reverse_kl_tail to the advantage, and the gradient keeps its mean"
        ),
    ] = False
    clip_ratio: Annotated[NotNegative, effect("of use_policy_gradient: how far the ratio may move either way")] = 0.2
    clip_ratio_low: Annotated[NotNegative | None, effect("the same, downwards; null: clip_ratio")] = None
    clip_ratio_high: Annotated[NotNegative | None, effect("the same, upwards; null: clip_ratio")] = None


class TeacherModel(Section, frozen=True):
    """A model whose log probabilities the policy is drawn to."""

    model_path: str | None = None
    server_urls: list[Annotated[str, Meta(pattern=r"\Ahttps?://[^?#]+\Z")]] | None = None
    weights: Literal["initial", "averaged", "present"] | None = None
    rate: Annotated[float, Meta(gt=0, le=1)] | None = None
    key: str | None = None
    agents: str | None = None


class TeacherUnusable(Explained):
    """A model of `distillation.teacher_models` that cannot be used as it is written."""


class Distillation(Section, frozen=True):
    """Teachers, which say of each token that the policy sampled how likely they find it (`docs/distillation.md`)."""

    enabled: Annotated[bool, effect("whether there is a teacher")] = False
    teacher_key: Annotated[
        str, effect("the field of a task that says which teacher teaches its rollouts, by the teachers' `key`")
    ] = "data_source"
    teacher_models: Annotated[
        dict[str, Any] | None,
        effect(
            "teachers by name, each with `model_path` (a folder or a hub's id: it is computed beside the trainer's "
            "models), `server_urls` (servers of vLLM or SGLang that have it) or `weights` (the policy itself: "
            "`initial`, `present`, or `averaged`, which goes `rate`, 0.05, of the way to the policy after each "
            "update); of several, each says what it teaches by `key` (the tasks whose teacher_key is this) or `agents` "
            "(a regular expression of calling agents' names)"
        ),
    ] = None
    privileged: Annotated[
        str | None,
        effect(
            "a function, `module:name` or `FILE.py:name`, that says of each call what its teacher is told and the "
            "policy is not; null: nothing"
        ),
    ] = None
    when_away: Annotated[
        Literal["wait", "skip"],
        effect(
            "a teacher's server does not answer: wait: until it does; skip: go on without what it was to say; either "
            "warns and names it"
        ),
    ] = "wait"
    distillation_loss: DistillationLossConfig = field(default_factory=DistillationLossConfig)

    def __post_init__(self) -> None:
        self.teachers()

    @property
    def without_rewards(self) -> bool:
        """Whether rewards have no part in training."""
        return self.enabled and not self.distillation_loss.use_task_rewards

    @property
    def averages(self) -> bool:
        """Whether a teacher is the average of the policy's weights."""
        return any(teacher.weights == "averaged" for teacher in self.teachers().values())

    def teachers(self) -> dict[str, TeacherModel]:
        """The teachers by name; none where there is no distillation. Raises TeacherUnusable for one that is wrong."""
        if not self.enabled:
            return {}
        sections = {name: each for name, each in (self.teacher_models or {}).items() if _names_a_model(each)}
        by_name = {name: _teacher(name, each) for name, each in sections.items()}
        if not by_name:
            raise TeacherUnusable(
                "config key distillation.enabled=true needs a teacher: give "
                "distillation.teacher_models.NAME.model_path (a folder or a hub's id), .server_urls (of vLLM or "
                "SGLang) or .weights (the policy itself: initial, averaged or present)"
            )
        for name, teacher in by_name.items():
            if len(by_name) > 1 and teacher.key is None and teacher.agents is None:
                raise TeacherUnusable(
                    f"config key distillation.teacher_models.{name}: of several teachers each says what it teaches: "
                    f"give key (of the tasks whose {self.teacher_key} is this) or agents"
                )
        return by_name


def _names_a_model(section: Any) -> bool:
    return not isinstance(section, dict) or any(value is not None for value in section.values())


def _teacher(name: str, section: Any) -> TeacherModel:
    key = f"distillation.teacher_models.{name}"
    try:
        teacher = msgspec.convert(section, TeacherModel)
        re.compile(teacher.agents or "")
    except msgspec.ValidationError as error:
        raise TeacherUnusable(
            f"config key {key}: {error}; there are model_path, server_urls, weights, rate, key and agents"
        ) from None
    except re.error as error:
        raise TeacherUnusable(f"config key {key}.agents is no regular expression: {error}") from error
    if sum((teacher.model_path is not None, bool(teacher.server_urls), teacher.weights is not None)) != 1:
        raise TeacherUnusable(f"config key {key} needs one of model_path, server_urls and weights")
    if teacher.rate is not None and teacher.weights != "averaged":
        raise TeacherUnusable(f"config key {key}.rate is of weights=averaged alone")
    return teacher


class CustomRewardFunction(Section, frozen=True):
    """A function in a file, as verl's: `compute_score(data_source, solution_str, ground_truth, extra_info)`."""

    path: Annotated[str | None, effect("the file; null: rewards come from the agents alone")] = None
    name: Annotated[str, effect("the function in it")] = "compute_score"
    reward_kwargs: Annotated[dict[str, Any] | None, effect("more arguments that it is called with, by name")] = None


class Judge(Section, frozen=True):
    """A model that ranks the rollouts of a group against each other."""

    model: Annotated[str | None, effect("its name at the service; null: no judge")] = None
    base_url: Annotated[str | None, effect("an OpenAI-compatible service, to /v1; null: what the SDK takes")] = None
    api_key_env: Annotated[str, effect("the environment variable that holds its key")] = "OPENAI_API_KEY"
    rubric: Annotated[str, effect("what it is told to look at")] = (
        "Prefer answers that are correct, complete and do what was asked."
    )
    timeout_seconds: Annotated[Above0, effect("how long one request to it may take")] = 120.0
    concurrency: Annotated[Positive, effect("groups judged at once")] = 8


class RewardModelSection(Section, frozen=True):
    """A model trained on preferences, which scores each rollout's conversation."""

    enable: Annotated[bool, effect("its score is the final reward")] = False
    model_path: Annotated[
        str | None, effect("a Hugging Face folder, or a model id: a sequence classifier with one label")
    ] = None
    dtype: Annotated[Literal["float32", "bfloat16"], effect("in which it is held and computed")] = "bfloat16"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], effect("where it computes; between its uses it waits in main memory")
    ] = "auto"


class OverlongBufferConfig(Section, frozen=True):
    """DAPO's soft overlong punishment: the final reward is lowered before an answer reaches its limit."""

    enable: Annotated[bool, effect("lower the reward of rollouts that come near to `max_resp_len` sampled tokens")] = (
        False
    )
    len: Annotated[Positive, effect("tokens before the limit over which the penalty grows")] = 128
    penalty_factor: Annotated[NotNegative, effect("the penalty at the limit and beyond")] = 1.0
    max_resp_len: Annotated[
        Positive | None,
        effect("the limit of sampled tokens on a rollout's longest branch; null: data.max_response_length"),
    ] = None


class RewardSection(Section, frozen=True):
    """Rewards that training gives beside the agents; they become the final reward."""

    command: Annotated[
        str | None,
        effect(
            "of `command`: a shell command that runs after the program in its folder (`pytest -q`): the reward is what "
            "it writes to the file $LIGHTNING_RL_REWARD, else 1 where it ends with status 0, else 0; `reward=...` is "
            "short for it. null: the program gives its own reward in these ways"
        ),
    ] = None
    custom_reward_function: CustomRewardFunction = field(default_factory=CustomRewardFunction)
    judge: Judge = field(default_factory=Judge)
    reward_model: RewardModelSection = field(default_factory=RewardModelSection)
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)


class SandboxSection(Section, frozen=True):
    """Where the program of `command` runs, and on what."""

    kind: Annotated[
        str,
        effect(
            "local (a folder of its own on the runner's machine; nothing is kept apart), docker (a container for each "
            "rollout), e2b, modal, daytona (of that service, whose SDK and key are needed), or a class of yours: "
            "module:Class, or path/to/file.py:Class"
        ),
    ] = "local"
    image: Annotated[
        str | None,
        effect(
            "docker: an image, or a folder with a Dockerfile; e2b: a template; modal, daytona: an image of a registry"
        ),
    ] = None
    options: Annotated[list[str], effect("of docker: further options of `docker run`")] = field(default_factory=list)
    folder: Annotated[
        str | None, effect("the folder in it where the program works; null: where the sandbox begins")
    ] = None
    files: Annotated[
        str | None,
        effect("a folder whose content is copied there before the program; `{field}` is the task's (`repos/{name}`)"),
    ] = None
    tests: Annotated[
        str | None,
        effect("a folder whose content is copied there after the program, over what it did, for reward.command"),
    ] = None
    setup: Annotated[str | None, effect("a shell command that runs there before the program")] = None
    environment: Annotated[dict[str, str], effect("further environment variables of all that runs in it")] = field(
        default_factory=dict
    )
    timeout_seconds: Annotated[
        Above0 | None,
        effect("the program is ended then, and what it did is judged; null: when the attempt's time is over"),
    ] = None
    gateway_url: Annotated[
        str | None,
        effect(
            "the gateway's URL as the sandbox reaches it, where that is another one: a tunnel, "
            "http://host.docker.internal:8080"
        ),
    ] = None


class EarlyStopping(Section, frozen=True):
    """When a run ends before its last step: by the reward on the tuning tasks, never on the validation ones."""

    patience: Annotated[
        Positive | None, effect("end after so many measurements without a better one; null: never early")
    ] = None
    min_delta: Annotated[NotNegative, effect("by how much a measurement has to be better, to count")] = 0.0


class TrainerSection(Section, frozen=True):
    """The run."""

    total_epochs: Annotated[Positive, effect("passes over the tasks")] = 1
    total_training_steps: Annotated[Positive | None, effect("steps; null: epochs x batches")] = None
    schedule: Annotated[
        Literal["sync", "one_step_off", "async"],
        effect(
            "when rollouts are asked for (`docs/training.md`): sync: when a step begins; one_step_off: one step ahead; "
            "async: steps ahead, and a step takes the groups that end first"
        ),
    ] = "sync"
    max_off_policy_threshold: Annotated[
        Size | None,
        effect("of async: by how many policy versions a trained token may be older than the weights; null: 4"),
    ] = None
    watchdog_seconds: Annotated[
        Above0 | None,
        effect("when no rollout has ended for so long, a warning says who waits for whom; null: none does"),
    ] = 600.0
    val_before_train: Annotated[bool, effect("validate before the first step")] = True
    val_only: Annotated[bool, effect("validate, and train nothing")] = False
    test_freq: Annotated[int, effect("validate and tune every so many steps; the last step always")] = -1
    save_freq: Annotated[int, effect("checkpoint every so many steps; the last step always")] = -1
    resume_mode: Annotated[
        Literal["disable", "auto", "resume_path"],
        effect(
            "auto: go on with what the run folder holds; disable: refuse a folder that holds a run; resume_path: begin "
            "a run in a folder of its own with the checkpoint at resume_from_path"
        ),
    ] = "disable"
    resume_from_path: Annotated[
        str | None,
        effect("of resume_path: RUN_DIR/checkpoints/step-N; weights, optimizers, counters and place in the data go on"),
    ] = None
    default_local_dir: Annotated[
        str | None,
        effect(
            "the run folder, where neither Trainer(run_dir=) nor --run-dir says another; null: a new one, "
            "runs/project_name/experiment_name-DATE"
        ),
    ] = None
    rollout_data_dir: Annotated[
        str | None,
        effect(
            "a folder where each step writes STEP.jsonl: a line for each row that it was given, with input, output, "
            "gts, score, step, request_id, and named rewards; null: none"
        ),
    ] = None
    validation_data_dir: Annotated[str | None, effect("the same of each validation")] = None
    logger: Annotated[
        list[Literal["console", "jsonl", "tensorboard", "wandb", "mlflow"]],
        effect(
            "where metrics go beside `metrics.jsonl`, which every run has, whether jsonl is named or not; the last "
            "three need the extra `tracking`"
        ),
    ] = field(default_factory=lambda: ["console", "jsonl"])
    project_name: Annotated[str | None, effect("folder of the run, where Trainer is given none: runs/project_name")] = (
        None
    )
    experiment_name: Annotated[str | None, effect("begins the name of the run's folder, before the date")] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], effect("where the policy is trained and sampled")] = "auto"
    sampler_tolerance: Annotated[
        Above0 | None,
        effect(
            "largest difference of log probabilities, sampler to trainer, on the first batch, where both compute in "
            "float32, and the mean difference where one computes in bfloat16; above it training stops; null: 0.0001, "
            "with vLLM 0.001; of the mean 0.1"
        ),
    ] = None
    nnodes: Annotated[
        Positive,
        effect("machines that train; more than one are a Ray cluster at RAY_ADDRESS (`docs/distributed.md`)"),
    ] = 1
    n_gpus_per_node: Annotated[
        Size,
        effect(
            "workers of a machine, each with a GPU of its own, or on a CPU with a core; they hold the models in shards "
            "(FSDP2). 0 or 1, on one machine: the trainer's own process trains"
        ),
    ] = 1
    devices: Annotated[
        list[Size] | None,
        effect(
            "GPUs of the processes that train, one each, as indices among those that the run sees "
            "(CUDA_VISIBLE_DEVICES); null: the first that rollout.devices does not name"
        ),
    ] = None
    colocate: Annotated[
        bool, effect("the same workers hold actor, critic and reference; false: each has nnodes x n_gpus_per_node")
    ] = True
    memory_check: Annotated[
        bool,
        effect(
            "on GPUs: refuse a run that by its plan (`lightning-rl plan`) needs more memory than they have, before a "
            "model is loaded; false: begin"
        ),
    ] = True
    all_failed: Annotated[
        Literal["stop", "go_on"],
        effect(
            "when in every rollout of a step the agent fails, gives no reward, or makes no call, in most of them its "
            "calls seem to go by another's URL, or infrastructure failed on every attempt of all: stop: the run ends, "
            "with the first traceback (a run that is resumed samples anew what infrastructure lost); go_on: failures "
            "and lacking rewards count as algorithm.agent_failure says"
        ),
    ] = "stop"
    max_restarts: Annotated[
        Size, effect("how often a run whose worker died goes on from its last checkpoint by itself")
    ] = 0
    critic_warmup: Annotated[
        Size, effect("first steps of a policy in which its critic learns and it stays, as do its schedules")
    ] = 0
    max_actor_ckpt_to_keep: Annotated[
        Positive | None, effect("checkpoints that are kept, beside the best one; null: all")
    ] = None
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)

    @property
    def per_node(self) -> int:
        """Workers of a machine."""
        return max(self.n_gpus_per_node, 1)

    @property
    def workers(self) -> int:
        """Processes that train; one is the trainer's own."""
        return self.nnodes * self.per_node


class BackendConfig(Section, frozen=True):
    """A frozen model beside the policy. Without a `url` litellm takes that of the model's maker."""

    kind: Literal["openai", "litellm"]
    url: Annotated[str, Meta(pattern=r"\Ahttps?://[^/?#@]+([/][^?#@]*)?\Z")] | None = None
    remote_model: str | None = None
    api_key_env: Annotated[str, Meta(pattern=r"\A[A-Z_][A-Z0-9_]*\Z")] | None = None


class BackendRefused(Explained):
    """A model of `gateway.backends` that cannot be used as it is written.

    No ValueError, since msgspec would tell those together with the value, in which somebody may have put a key.
    """


def _backend(name: str, section: Any) -> BackendConfig:
    key = f"gateway.backends.{name}"
    if isinstance(section, dict) and "api_key" in section:
        raise BackendRefused(
            f"config key {key}.api_key: a configuration is kept and shown, so no key stands in it; put the key into an "
            f"environment variable and give the variable's name: {key}.api_key_env=HELPER_API_KEY"
        )
    try:
        backend = msgspec.convert(section, BackendConfig)
    except msgspec.ValidationError as error:
        raise BackendRefused(f"config key {key}: {_advice(str(error))}") from None
    if not name:
        raise BackendRefused("config key gateway.backends: a model has no name")
    if backend.kind == "openai" and backend.url is None:
        raise BackendRefused(
            f"config key {key}.url: kind openai needs the service's base URL, which mostly ends in /v1"
        )
    return backend


def _advice(error: str) -> str:
    if "api_key_env" in error:
        return f"{error}; api_key_env is the NAME of an environment variable, in capital letters, never the key itself"
    if "`$.url`" in error:
        return f"{error}; url is http://... or https://..., without a user, a key or a query"
    return f"{error}; there are kind (openai, litellm), url, remote_model and api_key_env"


class GatewayConfig(Section, frozen=True):
    """How the agents' calls are taken."""

    sampling: Annotated[
        Literal["algorithm", "agent"],
        effect("whose temperature, top_p, top_k and penalties hold in training; validation always has val_kwargs"),
    ] = "algorithm"
    unknown_model: Annotated[
        Literal["policy", "refuse"],
        effect("a model name that nothing serves: the policy answers and the name is recorded, or 404"),
    ] = "policy"
    special_tokens_in_text: Annotated[
        Literal["text", "control"],
        effect(
            "what a special token (`<|im_end|>`) is where a user, a tool or a system spells it: its letters, or the "
            "token itself, as with vLLM and SGLang; prompts of Completions are their author's own (`docs/gateway.md`)"
        ),
    ] = "text"
    allowed_media_domains: Annotated[
        list[Host],
        effect(
            "hosts, `images.example.com` or `127.0.0.1:8000`, from which the gateway fetches images that agents name "
            "by an http(s) URL; every other URL is a 400 (`docs/multimodal.md`)"
        ),
    ] = field(default_factory=list)
    housekeeping: Annotated[
        dict[str, list[str]],
        effect(
            "by program, texts of the requests that it makes for itself (titles, commit messages, summaries): their "
            "calls are tagged, get no reward and are not trained; beside those of the known programs, or in their "
            "place where it is one of them (`docs/gateway.md`)"
        ),
    ] = field(default_factory=dict)
    backends: Annotated[
        dict[str, Any] | None,
        effect(
            "frozen models beside the policy (helpers, judges), by the name that agents ask for, each with `kind` "
            "(openai, litellm), `url`, `remote_model` (its name there) and `api_key_env`: the NAME of the environment "
            "variable with its key (`docs/helpers.md`); null: none"
        ),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        effect(
            "where every recorded span is sent, too: an OTLP/HTTP endpoint, `http://127.0.0.1:4318`; its key, if it "
            "wants one, comes from OTEL_EXPORTER_OTLP_HEADERS (`docs/opentelemetry.md`); null: nowhere"
        ),
    ] = None

    def __post_init__(self) -> None:
        self.frozen_models()
        if self.otlp_endpoint is not None:
            traces_url(self.otlp_endpoint, "config key gateway.otlp_endpoint")

    def frozen_models(self) -> dict[str, BackendConfig]:
        """The backends by name. Raises BackendRefused for one that is wrong."""
        return {name: _backend(name, section) for name, section in (self.backends or {}).items()}


class SftSection(Section, frozen=True):
    """Which answers `SFT` learns from, and how (`docs/sft.md`); `PPO` reads none of it."""

    traces: Annotated[
        Files,
        effect(
            "what SFT learns from, where it is given no traces: folders of runs, files of `export --what calls`, or of "
            "chats, a record with `messages` each"
        ),
    ] = None
    mode: Annotated[
        Literal["train", "val", "test"] | None,
        effect("rollouts of this mode alone; null: of all, so that validation tasks are learned from too"),
    ] = "train"
    models: Annotated[
        str | None, effect("learn from calls of models whose whole name this regular expression matches; null: of all")
    ] = None
    min_reward: Annotated[
        float | None, effect("learn from rollouts with at least this reward; null: from those without a reward too")
    ] = None
    best_of_group: Annotated[
        Positive | None, effect("learn from so many rollouts of each group: those with the highest rewards; null: all")
    ] = None
    weights: Annotated[
        Literal["equal", "reward"],
        effect("of answers in the loss: equal, or the reward of their rollout; one of 0 or less is left out"),
    ] = "equal"
    held_out: Annotated[
        Share, effect("share of groups that are not trained; the loss on them is `sft/held_out_loss`")
    ] = 0.1
    teacher: Annotated[
        str | None,
        effect(
            "the agent is run on the tasks with this model first, and its rollouts are learned from: one of "
            "`gateway.backends`, or a folder or hub id that the embedded engine samples"
        ),
    ] = None
    n: Annotated[Positive, effect("rollouts of the teacher on each task")] = 1
    lr: Annotated[
        Above0 | None, effect("learning rate of supervised training; null: `actor_rollout_ref.actor.optim.lr`")
    ] = None
    total_epochs: Annotated[Positive | None, effect("passes over what is learned from; null: as `trainer` says")] = None
    total_training_steps: Annotated[Positive | None, effect("supervised steps; null: as epochs make them")] = None


class PolicySection(Section, frozen=True):
    """One of several policies. `actor_rollout_ref`, `critic` and `algorithm` hold what differs from the run's."""

    agents: str | None = None
    reward: str | None = None
    train_every: Size = 1
    train_from: Positive = 1
    checkpoints_of: str | None = None
    pool: Positive = 5
    actor_rollout_ref: dict[str, Any] = {}
    critic: dict[str, Any] = {}
    algorithm: dict[str, Any] = {}


class Config(Section, frozen=True):
    """Everything that `PPO` and `SFT` read."""

    data: Data = field(default_factory=Data)
    actor_rollout_ref: ActorRolloutRef = field(default_factory=ActorRolloutRef)
    critic: CriticSection = field(default_factory=CriticSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    reward: RewardSection = field(default_factory=RewardSection)
    distillation: Distillation = field(default_factory=Distillation)
    trainer: TrainerSection = field(default_factory=TrainerSection)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    sft: SftSection = field(default_factory=SftSection)
    policies: Annotated[
        dict[PolicyName, PolicySection],
        effect(
            "several policies that one agent asks, by name, each with the keys of actor_rollout_ref, critic and "
            "algorithm that differ from the run's, and `agents`, `reward`, `train_every`, `train_from`, "
            "`checkpoints_of`, `pool` "
            "(`docs/policies.md`); {}: one policy"
        ),
    ] = {}
    command: Annotated[
        str | None,
        effect(
            "the agent, where no function is given: a program with its arguments (`claude -p {prompt}`), which is "
            "started for each rollout; `{field}` is the task's (`docs/command-agents.md`)"
        ),
    ] = None
    sandbox: SandboxSection = field(default_factory=SandboxSection)

    @property
    def loss_by_sampler(self) -> bool:
        """Whether `rollout_correction.loss_type` names the loss."""
        mode = self.actor_rollout_ref.actor.policy_loss.loss_mode
        return mode == "bypass_mode" or (self.algorithm.rollout_correction.bypass_mode and mode == "vanilla")

    @property
    def loss_mode(self) -> str:
        """The name of the loss that is trained (`rl.losses.LOSSES`)."""
        correction = self.algorithm.rollout_correction
        return correction.loss_type if self.loss_by_sampler else self.actor_rollout_ref.actor.policy_loss.loss_mode

    @property
    def rollout_is(self) -> Literal["token", "sequence", "geometric"] | None:
        """What importance weights are made of, `auto` resolved by the schedule; None: there are none."""
        correction = self.algorithm.rollout_correction
        if correction.rollout_is == "auto":
            return "token" if self.trainer.schedule != "sync" and not correction.bypass_mode else None
        return correction.rollout_is


class TrainConfig(Config, frozen=True):
    """What `lightning-rl train` reads besides."""

    agent: Annotated[
        str | None, effect("the agent that `lightning-rl train` trains: module:function, or path/to/file.py:function")
    ] = None
