exec(open('./table.py').read().split("def f(x)")[0])
ORDER=["as it is","2x votes","4x votes","writers + policy votes","votes on base answers","votes on DPO answers","from SFT","from DPO","LM head alive, 0.1","LM head alive, 1","WARM","margin","mean over tokens","sum over tokens","centring","the recruiter itself"]
NAME={"as it is":"as it is (2,400 votes)","2x votes":"twice the votes","4x votes":"four times the votes","writers + policy votes":"+ 2,400 votes on policies' answers","votes on base answers":"votes on the base's answers instead","votes on DPO answers":"votes on a DPO policy's answers instead","from SFT":"started from SFT","from DPO":"started from DPO","LM head alive, 0.1":"−0.1 log π(chosen) added","LM head alive, 1":"−1 log π(chosen) added","WARM":"mean of three seeds' weights (WARM)","margin":"margin 0.3 × strength","mean over tokens":"mean over answer tokens","sum over tokens":"a value at each token, summed","centring":"centring 0.01","the recruiter itself":"PPO on the recruiter's own score"}
out=[]
r4=lambda x: None if x is None else round(x,4)
for v in ORDER:
    for s,d in sorted(R.get(v,{}).items()):
        row={"variant":NAME[v],"seed":s}
        if 'rm' in d:
            m=d['rm']; row|={"accuracy":r4(m['pairs']['accuracy']),"nll":r4(m['pairs']['nll']),"ece":r4(m['pairs']['ece']),"accuracy_base":r4(m['acc test-base']['accuracy']),"accuracy_tuned":r4(m['acc test-dpo']['accuracy'])}
            row|={f"best_of_{k}":r4(m['bon test-base'][str(k)][0]) for k in (4,16,64)}
        row|={"gold":r4(d['ppo']['gold']),"se":r4(d['ppo']['se']),"kl":r4(d['ppo']['kl']),"gold_at_kl":r4(at_kl(d['curve'],2.5))}
        out.append(row)
import re
for name,pat in (("PPO on the recruiter's own score, 40 steps","PPO recruiter itself, 40 steps"),("DPO on the same votes","dpo"),("DPO, + 2,400 votes on policies' answers","DPO writers + policy votes")):
    for log in ("./s_a.log","./s_b.log","./s_c.log"):
        for l in open(log):
            m=re.match(r"(\d) (.+?) (\{.*\})$",l.strip().replace("'",'"'))
            if m and m[2]==pat:
                d=json.loads(m[3]); out.append({"variant":name,"seed":int(m[1]),"gold":r4(d['gold']),"se":r4(d['se']),"kl":r4(d['kl'])})
out.sort(key=lambda r:([NAME[v] for v in ORDER]+["PPO on the recruiter's own score, 40 steps","DPO on the same votes","DPO, + 2,400 votes on policies' answers"]).index(r["variant"])*10+r["seed"])
open('./w/me/reports/demo/reward-model.jsonl','w').writelines(json.dumps(r,ensure_ascii=False)+"\n" for r in out)
print(len(out))
