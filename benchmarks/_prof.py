import torch, hf_turbo
from benchmarks.decode import llama_3_8b, generate
m = llama_3_8b(32)
ids = torch.randint(0, 128000, (1, 128)).cuda()
for _ in range(2): generate(m, ids, 40, 1)
def step(model):
    a=min(generate(model, ids, 2, 1)[1] for _ in range(4)); b=min(generate(model, ids, 42, 1)[1] for _ in range(4)); return (b-a)/40*1e3
for _ in range(3):
    a=step(m)
    hf_turbo.patch(m); generate(m, ids, 60, 1); b=step(m); 
    print("stock", a, "turbo", b)
    hf_turbo.unpatch(m)
