import json, glob, numpy as np, sys
sys.path.insert(0,'./w/study')
R={}
for f in glob.glob('./runs/study/seed*/*/result.json'):
    d=json.load(open(f))
    if 'variant' in d: R.setdefault(d['variant'],{})[d['seed']]=d
def at_kl(curve, kl):
    xs=[(c['val/kl'],c['val/gold']) for c in curve if 'val/kl' in c and 'val/gold' in c]
    for (k0,g0),(k1,g1) in zip(xs,xs[1:]):
        if k0<=kl<=k1: return g0+(g1-g0)*(kl-k0)/(k1-k0)
def f(x): return ' '.join('  - ' if v is None else f'{v:.3f}' for v in x)
for v,by in sorted(R.items(), key=lambda x:-np.mean([d['ppo']['gold'] for d in x[1].values()])):
    s=sorted(by)
    g=lambda *p: [__import__('functools').reduce(lambda a,k:a[k],p,by[i]['rm']) if 'rm' in by[i] else None for i in s]
    m=lambda x: f'{np.mean(x):.3f}' if x and None not in x else '  -  '
    cols=[g('pairs','accuracy'),g('pairs','ece'),g('acc test-base','accuracy'),g('acc test-base','ece'),g('acc test-dpo','accuracy'),g('bon test-base','4'),g('bon test-base','16'),g('bon test-base','64')]
    cols=[[x[0] if isinstance(x,list) else x for x in c] for c in cols]
    print(f'{v:24} {s} | '+' '.join(m(c) for c in cols), '| PPO', f([by[i]['ppo']['gold'] for i in s]), m([by[i]['ppo']['gold'] for i in s]),'kl',f([by[i]['ppo']['kl'] for i in s]),'| at kl 2.5', f([at_kl(by[i]['curve'],2.5) for i in s]))
