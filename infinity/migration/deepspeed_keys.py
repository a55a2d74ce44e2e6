"""DeepSpeed settings that mean the same whatever their value is: what becomes of each, and why.

The names are those of DeepSpeed 0.19 (`runtime/config.py`, `runtime/zero/config.py`, `runtime/zero/offload_config.py`,
`runtime/swap_tensor/aio_config.py`) with the older ones that files in use still have. What depends on the value is in
`infinity.migration.deepspeed`. A name that ends in `.*` stands for everything below it.
"""

from __future__ import annotations

from collections.abc import Mapping

from infinity.migration.report import Outcome

_BETTER, _UNNEEDED, _UNSUPPORTED, _LOOP = Outcome.BETTER, Outcome.UNNEEDED, Outcome.UNSUPPORTED, Outcome.LOOP

_LIVE = "how much is gathered and read ahead follows from device.budget and host.budget, in bytes"
_MEASURED = "measured for each drive (`infinity bench calibrate`); nvme.threads and nvme.block_nbytes set it"
_FLAT = "the gradients of a unit lie in one buffer already"
_REDUCED = "a unit's gradients are reduced when its backward is over; there is no bucket to size"
_MASTER = "the master copy is completed from the 16-bit weights (split master), which keeps all of its bits"
_ORDER = "the ranks agree on every gather, so that different branches cannot hang; nothing has to be checked"
_PHASES = "engine.metrics() counts seconds by cause; `infinity train --trace FILE` writes a timeline"
_QUANTISED = "weights and gradients travel between ranks unquantised, so that the numbers stay exact"
_LEAF = (
    "a repeated block is one unit with everything in it; experts that get no token keep their parameters as they are"
)
_RECOMPUTED = "activations='recompute', or torch.utils.checkpoint in the model; both kinds of it work unchanged"
_MONITOR = "infinity.observe.exporters.MetricsLog writes to it; see docs/metrics.md"
_SEQUENCES = "sequence parallelism (Ulysses) belongs to the model's attention; ranks share data parallel work here"
_PLANNED = "`infinity plan` predicts memory, traffic and step time before anything runs"

FIXED: Mapping[str, tuple[Outcome, str]] = {
    # Training
    "train_batch_size": (_LOOP, "the batch of one step is what the loop feeds between two step() calls"),
    "train_micro_batch_size_per_gpu": (_LOOP, "the batch size of your DataLoader"),
    "managed_gradient_accumulation": (_UNNEEDED, "the loop decides when to call step()"),
    "prescale_gradients": (_UNNEEDED, "gradients are averaged in fp32, where the order of the division loses nothing"),
    "gradient_predivide_factor": (_UNNEEDED, "gradients are averaged in fp32"),
    "gradient_allreduce_op": (_UNNEEDED, "gradients are averaged"),
    "communication_data_type": (_BETTER, "gradients are reduced in fp32"),
    "data_types.grad_accum_dtype": (_BETTER, "gradients are accumulated in fp32"),
    "sparse_gradients": (_UNSUPPORTED, "sparse gradients are refused by name"),
    "zero_allow_untested_optimizer": (_UNNEEDED, "an optimizer that is not supported is refused by name"),
    "zero_force_ds_cpu_optimizer": (_UNNEEDED, "infinity.AdamW updates wherever the state lies"),
    "bf16.bf16_master_weights_and_grads": (_BETTER, _MASTER),
    "bf16.immediate_grad_update": (_UNNEEDED, "gradients are accumulated in fp32 as they arrive"),
    "bf16.check_grad_overflow": (_UNNEEDED, "bf16 has the range of fp32"),
    "fp16.fp16_master_weights_and_grads": (_BETTER, _MASTER),
    "fp16.auto_cast": (_LOOP, "convert the inputs, or use torch.autocast"),
    "torch_autocast.*": (_LOOP, "wrap the forward in torch.autocast"),
    "amp.*": (_UNSUPPORTED, "NVIDIA Apex; use fp16 with infinity.GradScaler"),
    # ZeRO
    "zero_optimization.contiguous_gradients": (_UNNEEDED, _FLAT),
    "zero_optimization.reduce_scatter": (_UNNEEDED, "stages 2 and 3 always reduce-scatter"),
    "zero_optimization.reduce_bucket_size": (_UNNEEDED, _REDUCED),
    "zero_optimization.use_multi_rank_bucket_allreduce": (_UNNEEDED, _REDUCED),
    "zero_optimization.allgather_partitions": (_UNNEEDED, "new parameters are gathered unit by unit"),
    "zero_optimization.allgather_bucket_size": (_UNNEEDED, "new parameters are gathered unit by unit"),
    "zero_optimization.overlap_comm": (
        _BETTER,
        "transfers always overlap; schedule='auto' says when units are updated",
    ),
    "zero_optimization.load_from_fp32_weights": (_UNNEEDED, "checkpoints hold every bit of the master"),
    "zero_optimization.elastic_checkpoint": (_UNNEEDED, "checkpoints are keyed by parameter names"),
    "zero_optimization.round_robin_gradients": (_UNNEEDED, "every rank takes its own part of every gradient"),
    "zero_optimization.ignore_unused_parameters": (_UNNEEDED, "unused parameters stay as they are, as in torch.optim"),
    "zero_optimization.legacy_stage1": (_UNNEEDED, "there is one stage 1"),
    "zero_optimization.sub_group_size": (_BETTER, "chunk (bytes of optimizer state) is chosen from the host budget"),
    "zero_optimization.prefetch_bucket_size": (_BETTER, _LIVE),
    "zero_optimization.stage3_prefetch_bucket_size": (_BETTER, _LIVE),
    "zero_optimization.stage3_model_persistence_threshold": (_BETTER, _LIVE),
    "zero_optimization.stage3_max_live_parameters": (_BETTER, _LIVE),
    "zero_optimization.stage3_max_reuse_distance": (_BETTER, "what is still there at its next use is never read again"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (
        _LOOP,
        "engine.save(folder) needs no gathering; `infinity checkpoint export` writes 16-bit weights",
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        _LOOP,
        "engine.save(folder) needs no gathering; `infinity checkpoint export` writes 16-bit weights",
    ),
    "zero_optimization.stage3_module_granularity_threshold": (_BETTER, _LEAF),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": (_UNNEEDED, "a unit is gathered with one all-gather"),
    "zero_optimization.stage3_allgather_sequential": (_UNNEEDED, "what is gathered is bounded by device.budget"),
    "zero_optimization.leaf_module.*": (_BETTER, _LEAF),
    "zero_optimization.zero_quantized_weights": (_UNSUPPORTED, _QUANTISED),
    "zero_optimization.zero_quantized_nontrainable_weights": (_UNSUPPORTED, _QUANTISED),
    "zero_optimization.zero_quantized_gradients": (_UNSUPPORTED, _QUANTISED),
    "zero_optimization.zeropp_loco_param.*": (_UNSUPPORTED, _QUANTISED),
    "zero_optimization.mics_hierarchical_params_gather": (_UNNEEDED, "parameters are gathered inside the shard group"),
    "zero_optimization.memory_efficient_linear": (_UNNEEDED, "no weight is kept by the graph between its uses"),
    "zero_optimization.pipeline_loading_checkpoint": (_UNNEEDED, "checkpoints are read group by group"),
    "zero_optimization.override_module_apply": (
        _UNNEEDED,
        "nothing of torch is replaced; use infinity.gathered(module)",
    ),
    "zero_optimization.log_trace_cache_warnings": (_UNNEEDED, "order/hits and order/misses in engine.metrics()"),
    "zero_optimization.enable_sanity_checks": (_UNNEEDED, _ORDER),
    "zero_optimization.save_muon_momentum_buffer_in_memory": (
        _UNSUPPORTED,
        "there is no Muon: it needs whole matrices",
    ),
    "zero_optimization.zenflow.*": (
        _UNSUPPORTED,
        "ZenFlow applies stale gradients; every schedule here gives exact ones",
    ),
    "zero_optimization.cpu_offload": (_BETTER, _LIVE),
    "zero_optimization.cpu_offload_params": (_BETTER, _LIVE),
    "zero_optimization.cpu_offload_param": (_BETTER, _LIVE),
    "zero_optimization.cpu_offload_use_pin_memory": (_BETTER, "host.pin: pinned where a CUDA device gains by it"),
    # Offload
    "zero_optimization.offload_param.buffer_count": (_BETTER, _LIVE),
    "zero_optimization.offload_param.buffer_size": (_BETTER, _LIVE),
    "zero_optimization.offload_param.max_in_cpu": (_BETTER, "what stays in host memory is what saves most traffic"),
    "zero_optimization.offload_optimizer.buffer_count": (_BETTER, _LIVE),
    "zero_optimization.offload_optimizer.buffer_size": (_BETTER, "no DeepSpeed setting; " + _LIVE),
    "zero_optimization.offload_optimizer.pipeline_read": (_UNNEEDED, "state is always read ahead"),
    "zero_optimization.offload_optimizer.pipeline_write": (_UNNEEDED, "state is always written behind"),
    "zero_optimization.offload_optimizer.pipeline": (_UNNEEDED, "state is always read ahead and written behind"),
    "zero_optimization.offload_optimizer.fast_init": (_UNNEEDED, "state is written once, at the start"),
    "zero_optimization.offload_optimizer.ratio": (_BETTER, "each unit is updated where its state lies; budgets decide"),
    "zero_optimization.offload_optimizer.super_offload": (
        _UNSUPPORTED,
        "it steps on speculation; updates are exact here",
    ),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": (_BETTER, "optimizer_threads sets the number"),
    # Disks
    "aio.block_size": (_BETTER, _MEASURED),
    "aio.queue_depth": (_BETTER, _MEASURED),
    "aio.thread_count": (_BETTER, "DeepSpeed ignores it since 0.16.4; " + _MEASURED),
    "aio.intra_op_parallelism": (_BETTER, _MEASURED),
    "aio.single_submit": (_UNNEEDED, "blocks are handed to threads of their own"),
    "aio.overlap_events": (_UNNEEDED, "transfers always overlap"),
    # Everything else
    "activation_checkpointing.partition_activations": (_UNSUPPORTED, "each rank keeps what its own samples need"),
    "activation_checkpointing.contiguous_memory_optimization": (_UNNEEDED, "saved activations lie in one pool"),
    "activation_checkpointing.*": (_LOOP, _RECOMPUTED),
    "steps_per_print": (_LOOP, _PHASES),
    "wall_clock_breakdown": (_LOOP, _PHASES),
    "memory_breakdown": (_LOOP, "engine.report() says what lies where"),
    "dump_state": (_LOOP, "config.describe() shows every setting"),
    "comms_logger.*": (_LOOP, _PHASES),
    "flops_profiler.*": (_LOOP, _PLANNED),
    "autotuning.*": (_BETTER, _PLANNED + "; --search tries the settings that matter"),
    "tensorboard.*": (_LOOP, _MONITOR),
    "wandb.*": (_LOOP, _MONITOR),
    "csv_monitor.*": (_LOOP, _MONITOR),
    "comet.*": (_LOOP, _MONITOR),
    "checkpoint.*": (_UNNEEDED, "checkpoints do not depend on ranks, stages or tiers"),
    "data_efficiency.*": (_UNSUPPORTED, "belongs to the data pipeline"),
    "curriculum_learning.*": (_UNSUPPORTED, "belongs to the data pipeline"),
    "elasticity.*": (_UNSUPPORTED, "choose batch and accumulation in the loop when the number of ranks changes"),
    "compression_training.*": (_UNSUPPORTED, "quantised training changes the numbers"),
    "tensor_parallel.*": (_UNSUPPORTED, "use torch.distributed.tensor.parallel"),
    "pipeline.*": (_UNSUPPORTED, "use torch.distributed.pipelining and offload the module of each stage"),
    "compile.*": (_LOOP, "torch.compile per unit"),
    "sequence_parallel_size": (_UNSUPPORTED, _SEQUENCES),
    "seq_parallel_communication_data_type": (_UNSUPPORTED, _SEQUENCES),
    "data_types.*": (_BETTER, "gradients are accumulated and reduced in fp32"),
    "fp32_allreduce": (_BETTER, "gradients are reduced in fp32"),
    "disable_allgather": (_UNNEEDED, "new parameters are gathered unit by unit"),
    "dataloader_drop_last": (_LOOP, "drop_last of your DataLoader"),
    "timers.*": (_LOOP, _PHASES),
    "monitor_config.*": (_LOOP, _MONITOR),
    "nebula.*": (_UNNEEDED, "engine.save(..., wait=False) writes checkpoints behind training"),
    "use_data_before_expert_parallelism": (_UNNEEDED, "every rank holds its part of every expert"),
    "graph_harvesting": (_UNNEEDED, "updates run where the state lies, on the CPU"),
    "hybrid_engine.*": (_UNNEEDED, "generate() works between steps, with the same units"),
    "eigenvalue.*": (_UNSUPPORTED, "belongs to compression"),
    "quantize_training.*": (_UNSUPPORTED, "quantised training changes the numbers"),
    "weight_quantization.*": (_UNSUPPORTED, "quantised weights change the numbers"),
    "progressive_layer_drop.*": (_LOOP, "drop layers in the model's forward; read-ahead follows"),
    "sparse_attention.*": (_LOOP, "belongs to the model"),
    "seed": (_LOOP, "torch.manual_seed"),
    "zero_optimization.param_persistence_threshold": (_BETTER, _LIVE),
}
