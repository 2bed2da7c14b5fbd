"""Pure tensor maths: torch in, torch out, float32 or better, no settings objects and no state.

| function | paper | equation |
| --- | --- | --- |
| `logps.token_logps` | | `log_softmax(logits / temperature)[y]`, in chunks of positions |
| `masking.aggregate` token_mean | DAPO, arXiv 2503.14476 | `sum m x / tokens` |
| `masking.aggregate` seq_mean_token_mean | GRPO, arXiv 2402.03300, eq. 3 | `sum (sum m x / sum m) / rows` |
| `masking.aggregate` seq_mean_token_sum_norm | Dr. GRPO, arXiv 2503.20783 | `sum m x / (rows * length)` |
| `advantages.group_advantages` | GRPO, arXiv 2402.03300 | `(r - mean) / (std + eps)` |
| `advantages.rloo` | RLOO, arXiv 2402.14740 | `G / (G - 1) (r - mean)` |
| `advantages.opo` | OPO, arXiv 2505.23585 | `r - sum l r / sum l` |
| `advantages.gpg`, `policy_loss.gpg_loss` | GPG, arXiv 2504.02546 | `N / N_nonzero (r - mean)`; `-A logp` |
| `advantages.grpo_passk` | Pass@k, arXiv 2503.19595 | best of the group: `r_1 - r_2` |
| `advantages.summed_after_normalizing` | GDPO, arXiv 2601.05242 | normalise per function, sum, normalise |
| `advantages.reinforce_plus_plus` | REINFORCE++, arXiv 2501.03262 | whitened returns |
| `advantages.reinforce_plus_plus_baseline` | the same | whitened `r - mean` |
| `advantages.remax` | ReMax, arXiv 2310.10505 | `R_t - r_greedy` |
| `advantages.gae` | GAE, arXiv 1506.02438, eq. 16 | `sum_l (gamma lam)^l delta_{t+l}` |
| `advantages.discounted_returns` | | `sum_l gamma^l r_{t+l}` |
| `policy_loss.clipped_surrogate` | PPO, arXiv 1707.06347, eq. 7 | `-min(r A, clip(r) A)` |
| ... dual_clip | arXiv 1912.09729 | at most `-c A` where `A < 0` |
| ... on a sequence `log_ratio` | GSPO, arXiv 2507.18071, eq. 7 | `r = exp(mean_t log r_t)` |
| `policy_loss.sequence_log_ratio_at_tokens` | GSPO-token, arXiv 2507.18071 | `sg[s] logp / sg[logp]` |
| `policy_loss.cispo` | CISPO, arXiv 2506.13585 | `-sg[clip(r)] A logp` |
| `policy_loss.sapo` | SAPO, arXiv 2511.20347 | `-(4 / tau) sigmoid(tau (r - 1)) A` |
| `policy_loss.geo_mean` | GMPO, arXiv 2507.20673 | `-A exp(mean_t clip(log r_t))` |
| `policy_loss.clip_cov`, `kl_cov` | arXiv 2505.22617 | tokens of large `cov(A, logp)` |
| `policy_loss.value_loss` | arXiv 2006.05990 | `max((v - R)^2, (clip(v) - R)^2) / 2` |
| `kl.k1`, `k2`, `k3`, `straight_through` | Schulman (2020) | `d`, `d^2 / 2`, `exp(-d) - 1 + d` |
| `kl.kl_in_reward`, `adapted_coef` | arXiv 2203.02155, eq. 2; 1909.08593, sec. 2.2 | `r - coef kl` |
| `distillation.divergence` | GKD, arXiv 2306.13649; SDPO | KL, reverse KL, skew Jensen-Shannon |
| `distillation.sampled_token_loss` | SDPO, arXiv 2601.20802 | `sg[logp - logq] logp` |
| `importance.rollout_correction` | V-trace, arXiv 1802.01561 | `min(p / q, upper)`, masks, veto |
| `ema.lerp_` | mean teacher, arXiv 1703.01780; TR-DPO, arXiv 2404.09656 | `(1 - rate) a + rate s` |
| `schedules.lr_multiplier` | arXiv 1608.03983, 1706.03762, 2404.06395 | cosine, inverse square root, WSD |

`sg` is stop-gradient, `m` the loss mask, `d = logp - ref_logp`.
"""
