"""One of two processes with vLLM inside: `one_of_two_ranks.py RANK PORT TENSOR_PARALLEL_SIZE`.

Each writes for prompts of its own, as many as it likes, and compares with transformers.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_rl.models.roles import named_base_tensors
from lit_rl.rollout.vllm_colocate import VLLMColocate
from rollout.tiny import END, PAD, RAGGED, bound, completions, generate, llama, numbers_as_text
from rollout.tiny import plain_logps as logps_of


def main(rank: int, port: str, size: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = llama(hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
    engine = VLLMColocate(gpu_memory_utilization=0.05, max_num_seqs=16, tensor_parallel_size=size)
    engine.bind(model, end_token_ids=[END], pad_token_id=PAD, decode=numbers_as_text, max_tokens=128)
    prompts = RAGGED[:2] if rank == 0 else RAGGED[2:]
    for version in (1, 2):
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        engine.sync_weights(named_base_tensors(model), version)
        greedy = generate(engine, prompts, temperature=0.0, ignore_eos=True)
        assert completions(greedy) == completions(
            generate(bound(model), prompts, temperature=0.0, ignore_eos=True)
        )
        drawn = generate(engine, prompts, G=2, temperature=0.7)
        torch.testing.assert_close(drawn.rollout_logps, logps_of(model, drawn, 0.7), atol=1e-4, rtol=0)
    engine.close()
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == 2, "the trainer's group still works"
    dist.destroy_process_group()
    print("both agree", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    os._exit(0)  # what vLLM leaves running ends here
