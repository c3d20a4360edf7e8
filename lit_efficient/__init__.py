"""Training-efficiency techniques for PyTorch Lightning: they compose, resume bit-exactly and prove what they save.

``import lit_efficient`` is cheap: the names below are imported when they are first used.
"""

from importlib import import_module

__version__ = "0.1.0"

# The one list of public names, each with the module that holds it (relative to this package). The command line resolves
# short class names in YAML with it, `techniques` reads the named files, and the contract tests run over them.
PUBLIC: dict[str, str] = {
    # the contract
    "LossHooks": "declaration",
    "Phase": "declaration",
    "Report": "declaration",
    "Technique": "technique",
    "ConflictError": "errors",
    "ConfigurationError": "errors",
    "DivergedError": "errors",
    "LitEfficientError": "errors",
    "apply": "application",
    "restore": "mechanisms.restore",
    "compare": "evidence.compare",
    "plan": "evidence.plan",
    "verify": "evidence.verification",
    "tune": "evidence.tuned",
    "mix_in": "surgery",
    "merge_adapters": "mechanisms.adapters.merge",
    "depth_groups": "mechanisms.blocks.freezing",
    "discriminative_rates": "optimizers.rates",
    "load_int4": "callbacks.quantization_aware_training",
    "replace_head": "callbacks.replace_head",
    "split_groups": "optimizers.rates",
    "thawed": "callbacks.gradual_unfreezing",
    # techniques: slot trainer.callbacks
    "APOLLO": "callbacks.apollo",
    "ActivationCheckpointing": "callbacks.activation_checkpointing",
    "AttentionBackend": "callbacks.attention_backend",
    "ActivationOffload": "callbacks.activation_offload",
    "BlockSwap": "callbacks.block_swap",
    "ChannelsLast": "callbacks.channels_last",
    "CheckpointAverage": "callbacks.checkpoint_average",
    "ChunkedCrossEntropy": "callbacks.chunked_cross_entropy",
    "Compile": "callbacks.compile",
    "DataLoaderTuner": "callbacks.data_loader_tuner",
    "DevicePrefetcher": "callbacks.device_prefetcher",
    "EMA": "callbacks.ema",
    "ExactResume": "callbacks.exact_resume",
    "FastMatmul": "callbacks.fast_matmul",
    "FeatureMatching": "callbacks.feature_matching",
    "GaLore": "callbacks.galore",
    "GradualUnfreezing": "callbacks.gradual_unfreezing",
    "AlignmentHead": "mechanisms.alignment",
    "HiddenAlignment": "callbacks.hidden_alignment",
    "IA3": "callbacks.ia3",
    "LRFinder": "callbacks.lr_finder",
    "LatentAlignment": "callbacks.latent_alignment",
    "LoRA": "callbacks.lora",
    "LowBitOptimizer": "callbacks.low_bit_optimizer",
    "MaxBatchSize": "callbacks.max_batch_size",
    "MemoryEfficientLayers": "callbacks.memory_efficient_layers",
    "OffloadOptimizer": "callbacks.offload_optimizer",
    "KahanSummation": "callbacks.kahan_summation",
    "OptimizerInBackward": "callbacks.optimizer_in_backward",
    "KeepFloat32": "callbacks.keep_float32",
    "ScheduleFree": "callbacks.schedule_free",
    "PeftAdapter": "callbacks.peft_adapter",
    "PowerEMA": "callbacks.power_ema",
    "PrefixTuning": "callbacks.prefix_tuning",
    "QuantizationAwareTraining": "callbacks.quantization_aware_training",
    "QuantizeBase": "callbacks.quantize_base",
    "ReplaceHead": "callbacks.replace_head",
    "SNRWeighting": "callbacks.snr_weighting",
    "StochasticDepth": "callbacks.stochastic_depth",
    "StochasticRounding": "callbacks.stochastic_rounding",
    "Tiling": "callbacks.tiling",
    "TokenWeightedAccumulation": "callbacks.token_weighted_accumulation",
    # other callbacks
    "EmptyCache": "callbacks.empty_cache",
    "NonFiniteGuard": "callbacks.non_finite_guard",
    "RunMetrics": "callbacks.run_metrics",
    "SampleImages": "callbacks.sample_images",
    "SampleText": "callbacks.sample_text",
    "SignalCheckpoint": "callbacks.signal_checkpoint",
    "ThroughputBar": "callbacks.throughput_bar",
    "ThroughputMeter": "callbacks.throughput_meter",
    # slot trainer.plugins
    "Float8Precision": "precision.float8_precision",
    "SafeCheckpointIO": "plugins.safe_checkpoint_io",
    # slot optimizer; torch's own names stay torch's
    "FusedAdamW": "optimizers.fused_adamw",
    "GroupedAdafactor": "optimizers.grouped_adafactor",
    "Lion": "optimizers.lion",
    "MuonAdamW": "optimizers.muon_adamw",
    "ScheduleFreeAdamW": "optimizers.schedule_free_adamw",
    "muon_groups": "optimizers.muon_adamw",
    "parameter_groups": "optimizers.groups",
    "snr_weight": "losses.snr",
    "distillation_divergence": "losses.distillation",
    "chunked_distillation": "losses.chunked_distillation",
    "suggest_lr": "mechanisms.trials.rate_range",
    "round_stochastically": "optimizers.float32_step",
    "step_in_float32": "optimizers.float32_step",
    "to_low_rank": "optimizers.low_rank",
    "to_low_bit": "optimizers.low_bit",
    # slot model
    "LanguageModeling": "tasks.language_modeling",
    "Distillation": "tasks.distillation",
    "DistillationLoss": "tasks.distillation",
    "Divergence": "losses.distillation",
    "Preference": "tasks.preference",
    "RewardModeling": "tasks.reward_modeling",
    "Autoencoding": "tasks.autoencoding",
    "Samples": "tasks.latent_generator",
    "LatentDiffusion": "tasks.latent_diffusion",
    # slot data
    "DigitImages": "data.digit_images",
    "ImageData": "data.image_data",
    "ImageColumns": "data.images.image_columns",
    "ImageScores": "data.images.image_judge",
    "ImageSplits": "data.images.image_tables",
    "ImageView": "data.images.image_view",
    "LatentDigits": "data.latent_digits",
    "LatentData": "data.latent_data",
    "TeacherFeatures": "data.latents.teacher_features",
    "CorpusFiles": "data.text.arguments",
    "EncodedData": "data.encoded_data",
    "EncodedFields": "data.latents.encoded_fields",
    "EncodedNumbers": "data.latents.encoded_fields",
    "ChannelScaling": "data.latents.encoded_fields",
    "LanguageChat": "data.text.arguments",
    "LanguageData": "data.language_data",
    "LanguageRows": "data.text.arguments",
    "LanguageStream": "data.text.arguments",
    "PhotoCrops": "data.photo_crops",
    "PreferenceChat": "data.text.arguments",
    "PreferenceData": "data.preference_data",
    "PreferenceRows": "data.text.arguments",
    "PythonCorpus": "data.python_corpus",
    "AspectBuckets": "data.images.aspect_buckets",
    # data that can be resumed
    "KeyedBatchSampler": "mechanisms.order.keyed_batch_sampler",
    "ResumableLoader": "mechanisms.order.resumable_loader",
    "ResumableSampler": "mechanisms.order.resumable_sampler",
    "train_superbpe": "data.text.superbpe",
    # losses
    "DiffusionProcess": "losses.noise_process",
    "Sampler": "losses.diffusion_sampling",
    "TimestepSampling": "losses.timesteps",
    "Perceptual": "models.perceptual",
    "chunked_cross_entropy": "losses.chunked_cross_entropy",
    "cosine_loss": "losses.feature_matching",
    "l2_loss": "losses.feature_matching",
    "repa_loss": "losses.feature_matching",
    "VFLoss": "losses.feature_matching",
    "vf_loss": "losses.feature_matching",
    # models
    "CausalLMConfig": "models.causal_lm",
    "DiffusersModelConfig": "models.diffusers_model",
    "GPT": "models.gpt",
    "GPTConfig": "models.gpt",
    "GPTConstants": "models.gpt",
    "Condition": "models.condition",
    "CaptionReading": "models.text_encoder",
    "TextEncoder": "models.text_encoder",
    "TextEncoderConfig": "models.text_encoder",
    "DiT": "models.dit",
    "DiTConfig": "models.dit",
    "DiTVariant": "models.dit",
    "Autoencoder": "models.autoencoder",
    "AutoencoderConfig": "models.autoencoder",
    "DiffusersAutoencoder": "models.autoencoders",
    "LatentCodec": "models.latent_codec",
    "PreviewDecoder": "models.preview_decoder",
    "build_autoencoder": "models.autoencoders",
}

__all__ = ["PUBLIC", "__version__", *PUBLIC]  # noqa: PLE0604 (names are resolved by __getattr__)


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
