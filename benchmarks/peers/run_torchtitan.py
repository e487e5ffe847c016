"""torchtitan 0.2.2's Qwen3 on the peers' data: `run_torchtitan.py FOLDER ROWS STEPS ROWS_OF_A_MICROBATCH`.

Its own parallelisation, loss, clipping and optimizer in a plain loop: FSDP2 on a mesh of one rank for bf16 compute with
fp32 master weights and reduction, torch.compile, attention by torch's varlen_attn.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from rows import ROW, make_rows, report, timed
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.components.optimizer import build_optimizers
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.llama4.infra.parallelize import apply_fsdp
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import Qwen3ModelArgs
from torchtitan.protocols.train_spec import get_train_spec

folder, num_rows, steps, of_microbatch = Path(sys.argv[1]), *map(int, sys.argv[2:5])
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
config = json.loads((folder / "config.json").read_text())
experts = config.get("num_experts") or config.get("num_local_experts")
vocab = config["vocab_size"]

job = JobConfig()
job.training.seq_len, job.training.local_batch_size = ROW, num_rows
job.training.mixed_precision_param = "bfloat16"
job.parallelism.fsdp_reshard_after_forward = "never"
job.activation_checkpoint.mode = "none"
job.compile.enable = True
job.optimizer.lr, job.optimizer.beta1, job.optimizer.beta2, job.optimizer.weight_decay = 1e-5, 0.9, 0.95, 0.0
job.optimizer.implementation = "fused"
dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
dims.build_mesh()
moe = MoEArgs()
if experts:
    moe = MoEArgs(
        num_experts=experts,
        num_shared_experts=0,
        top_k=config["num_experts_per_tok"],
        route_norm=True,
        score_func="softmax",
        score_before_experts=False,
        load_balance_coeff=None,
        use_grouped_mm=True,
    )
arguments = Qwen3ModelArgs(
    dim=config["hidden_size"],
    n_layers=config["num_hidden_layers"],
    n_heads=config["num_attention_heads"],
    n_kv_heads=config["num_key_value_heads"],
    vocab_size=vocab,
    head_dim=config["head_dim"],
    hidden_dim=config["intermediate_size"],
    norm_eps=config["rms_norm_eps"],
    rope_theta=config["rope_parameters"]["rope_theta"],
    max_seq_len=ROW,
    attn_type="varlen",
    attn_mask_type="block_causal",
    eos_id=vocab - 1,
    moe_enabled=bool(experts),
    moe_inter_dim=config.get("moe_intermediate_size", 0),
    moe_args=moe,
)
spec = get_train_spec("qwen3")
with torch.device("meta"):
    model = spec.model_cls(arguments)
model = spec.parallelize_fn(model, dims, job)
mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("rank", "one"))["one"]
apply_fsdp(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False, reshard_after_forward_policy="never")
weights = {}
for file in folder.glob("*.safetensors"):
    weights |= load_file(file)
weights = spec.state_dict_adapter(arguments, None).from_hf(weights)
model.to_empty(device=device)
with torch.no_grad():
    model.init_weights(buffer_device=device)
    for name, parameter in model.named_parameters():
        whole = weights[name.replace("_orig_mod.", "")].to(device, torch.float32)
        parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))
model.train()
optimizers = build_optimizers([model], job.optimizer, dims)
loss_function = build_cross_entropy_loss(job)
tokenizer = SimpleNamespace(eos_id=vocab - 1)
rows = make_rows(vocab, num_rows, steps)
first: list[float] = []


def train_step(step: int) -> None:
    ids, labels = rows.ids[step].to(device), rows.labels(step).to(device)
    num_targets, total = (labels != -100).sum(), torch.zeros((), device=device)
    for inputs, targets in zip(ids.split(of_microbatch), labels.split(of_microbatch), strict=True):
        masks = model.get_attention_masks(input_batch=inputs, tokenizer=tokenizer)
        loss = loss_function(model(inputs, attention_masks=masks), targets) / num_targets
        loss.backward()
        total += loss.detach()
        del loss
    norm = clip_grad_norm_(list(model.parameters()), 1.0, foreach=True, pp_mesh=None, ep_enabled=False)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if not first:
        first.extend([total.item(), float(norm)])


seconds = [timed(lambda step=step: train_step(step)) for step in range(steps)]
report("torchtitan 0.2.2", folder, rows, seconds, (first[0], first[1]), of_microbatch * ROW)
sys.stdout.flush()
os._exit(0)
