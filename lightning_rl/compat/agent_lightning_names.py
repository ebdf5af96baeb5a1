"""What to write here for each public name of Agent-lightning 0.3 and 1.0 that is missing here: the end of the
AttributeError's message. The names that it has are attributes of `lightning_rl`."""

_NOT_TRACED = "leave it out: the gateway records the calls, and nothing is instrumented"
_TYPE = "a type of theirs that nothing here takes; annotate with Any"
_ONE_STORE = "leave it out: the store is store.db of the run folder, or that of lightning-rl serve (docs/store.md)"
_PROMPTS = "lrl.PromptOptimization, which is GEPA, or an algorithm of your own that publishes prompts (lrl.algo)"
_SPANS = "lrl.Span, as GET /api/v1/rollouts/{id}/attempts/{id}/spans gives it"
_ATTRIBUTES = "attributes are plain dicts; emit_reward(..., attributes=...) flattens them"
_COMPONENTS = "lightning_rl.loading.load('module:name', 'what it is')"
_ENVIRONMENT = "os.environ"
_REWARDS = "rollout.reward and rollout.rewards of the store's rollout"
_STRATEGY = "leave it out: a server process and runner processes beside the trainer, or lrl.Trainer(server=URL)"
_RUNNER = "call the agent's function, or lrl.Trainer(agent).dev(tasks)"
_SERVER = "lightning-rl serve"
_OLD = "of Agent-lightning's version 0.1; lrl.Trainer and lightning-rl serve do its work"
_PADDING = "rows are padded by lightning_rl.training; the columns of verl come from lrl.AgentModeDaemon"

_NAMES = {
    _NOT_TRACED: "get_active_tracer set_active_tracer clear_active_tracer get_tracer get_tracer_provider "
    "instrument_agentops instrument_agentops_langchain instrument_litellm instrument_vllm instrument_weave "
    "uninstrument_agentops uninstrument_agentops_langchain uninstrument_litellm uninstrument_vllm uninstrument_weave "
    "setup setup_module InMemoryWeaveTraceServer",
    _TYPE: "AgentDataset AttemptStatus AttributeValue Attributes GenericResponse LoadedDataset OptionalDefaults "
    "PaginatedResult ParallelWorkerBase Resource ResourceUnion RolloutLegacy RolloutRawResult RolloutRawResultLegacy "
    "StatusCode Task TaskIfAny TaskInput Worker WorkerStatus Attempt RolloutMode RolloutStatus LaunchMode",
    _ONE_STORE: "InMemoryLightningStore LightningStoreCapabilities "
    "LightningStoreStatistics LightningStoreThreaded CollectionBasedLightningStore LightningCollections "
    "InMemoryLightningCollections Collection KeyValue Queue DequeBasedQueue DictBasedKeyValue ListBasedCollection "
    "AtomicLabels AtomicMode FilterField FilterOptions SortOptions",
    _PROMPTS: "APO",
    _SPANS: "OtelResource OtelTraceAdapter SpanAttributeNames SpanContext SpanCoreFields SpanLike SpanNames "
    "SpanRecordingContext TraceState TraceStatus Link Event",
    _ATTRIBUTES: "check_attributes_sanity extract_links_from_attributes extract_tags_from_attributes "
    "filter_and_unflatten_attributes filter_attributes flatten_attributes format_exception_attributes "
    "sanitize_attribute_value sanitize_attributes sanitize_list_attribute_sanity unflatten_attributes",
    _COMPONENTS: "build_component instantiate_component instantiate_from_spec load_class",
    _ENVIRONMENT: "LightningEnvVar resolve_bool_env_var resolve_int_env_var resolve_str_env_var",
    _REWARDS: "find_final_reward find_reward_spans get_reward_value get_rewards_from_span is_reward_span",
    _STRATEGY: "ClientServerExecutionStrategy ExecutionStrategy SharedMemoryExecutionStrategy ExecutionEvent "
    "MultiprocessingEvent ThreadingEvent",
    _RUNNER: "LegacyAgentRunner LitAgentRunner Runner TaskRunner",
    _SERVER: "LightningStoreServer PythonServerLauncher PythonServerLauncherArgs",
    _OLD: "AgentLightningClient AgentLightningServer AgentLightningTrainer DevTaskLoader",
    _PADDING: "get_left_padded_ids_and_attention_mask get_right_padded_ids_and_attention_mask",
    "lrl.Trainer(agent).fit(lrl.VERL(config), tasks)": "run_ppo AglAsyncRolloutManager AglRolloutManager "
    "AglRolloutManagerBase RolloutAdapter",
    "lrl.Rollout, as the store gives it": "CompletedRollout EnqueuedRollout",
    "store.enqueue([RolloutRequest(task=...)]) of lightning_rl.store": "EnqueueRolloutRequest",
    "lrl.algo(function), or a subclass of lrl.Algorithm with prepare, open, run and close": "FastAlgorithm",
    "leave it out: rows come from the forest of calls; whose is lrl.TracerTraceToTriplet(agent_match)": "Adapter "
    "TraceAdapter TraceToTripletBase Tracer",
    "the span's gen_ai.input.messages and gen_ai.output.messages, or lightning-rl export": "get_message_value "
    "get_object_value",
    "emit_reward(..., call_id=answer.id)": "query_linked_spans",
    "uuid.uuid4().hex": "generate_id",
    "type(value).__qualname__": "full_qualified_name",
    "lightning-rl train agent=module:function, or lrl.Trainer": "lightning_cli main",
}

INSTEAD = {name: text for text, names in _NAMES.items() for name in names.split()}
