-- Queries of the tables in README and `docs/`, which `python docs/tables.py` writes.
--
-- A line `-- NAME: FILE` begins a query over the lines of a CSV file, `rows`. A page names it between the two comments of
-- a table, `<!-- table: NAME -->` and `<!-- /table -->`. docs/tables.py lists the functions next to SQLite's.

-- readme.compare: reproductions/measured/compare_cpu.csv
select name as config, printf('%.2f M', parameters / 1e6) as parameters,
  printf('%.0f k', state_size / 1e3) as state, printf('%.3f', val_loss) as "validation loss"
from rows where name in ('gdn_h2', 'gla', 'transformer') order by val_loss

-- readme.mixers: mixers
select name from rows order by case kind when 'matrix' then 0 when 'other' then 1 else 2 end, name

-- readme.speed: reproductions/measured/performance_kernels.csv
select case op when 'delta_rule' then 'delta rule with gate' when 'linear_head' then 'decay per head and step'
  when 'linear_channel' then 'decay per key channel' else 'constant decay' end as recurrence,
case op when 'delta_rule' then 'Gated DeltaNet' when 'linear_head' then 'Mamba2' when 'linear_channel' then 'HGRN2, GLA with K=V'
  else 'RetNet, TNL' end as mixers,
formatted('%.2f', field(rowid, 'fwd_bwd_graph_ms')) as here,
formatted('%.2f', field(rowid, 'peers.fla *.fwd_bwd_graph_ms')) as "flash-linear-attention",
formatted('%.1f ×', field(rowid, 'peers.fla *.fwd_bwd_graph_ratio')) as speedup
from rows where "shape.B" = 4 and "shape.H" = 8

-- cost_over_size_h100: reproductions/measured/cost_over_size_h100.csv
with of as (select c.model, c.size, c.tokens, c.parameters, c.tokens_per_second as speed, e.tokens_per_second as eager
    from rows c left join rows e on e.model = c.model and e.size = c.size and e.tokens = c.tokens and e.mode = 'eager'
    where c.mode = 'captured' and c.tokens_per_second is not null),
  shown as (select *, printf('%.0fk', speed / 1e3) || case when eager is null then '' else printf(' (%.1f ×)', 1.0 * speed / eager) end as value from of)
select case model when 'gated_deltanet' then 'Gated DeltaNet' when 'gla' then 'GLA' when 'mamba2' then 'Mamba2' when 'h2' then 'H2'
    else 'Transformer++' end as model, tokens as "tokens in a step",
  max(case size when '5M' then value end) as "5M", max(case size when '20M' then value end) as "20M",
  max(case size when '60M' then value end) as "60M", max(case size when '150M' then value end) as "150M",
  max(case size when '400M' then value end) as "400M", max(case size when '1.3B' then value end) as "1.3B"
from shown where tokens <> 32768 group by model, tokens order by case model when 'gated_deltanet' then 0 when 'gla' then 1 when 'mamba2' then 2 when 'h2' then 3 else 4 end, tokens

-- cost_over_size_peers_h100: reproductions/measured/cost_over_size_peers_h100.csv
with of as (select *, case when model in ('fla', 'gated_deltanet') then 'Gated DeltaNet' else 'Transformer++, Llama' end as family,
    case when library <> '' then library else 'ours, ' || mode end as who from rows where tokens_per_second is not null),
  points as (select * from of where (size = '60M' and tokens = 8192) or (size = '400M' and tokens = 32768))
select family as model, who as "", max(case size when '60M' then printf('%.0fk', tokens_per_second / 1e3) end) as "60M, 8,192 tokens",
  max(case size when '400M' then printf('%.0fk', tokens_per_second / 1e3) end) as "400M, 32,768 tokens",
  max(case size when '400M' then printf('%.1f', peak_gib) end) as "GiB at 400M"
from points group by family, who order by family, library <> '', mode desc

-- kda_h100: reproductions/measured/kda_h100.csv
with cells as (select *, printf('%d × %d × %d', "shape.B", "shape.H", "shape.T") as shape, "peers.fla chunk_gdn2.fwd_graph_ms" as f,
    "peers.fla chunk_gdn2.fwd_bwd_graph_ms" as fb, "peers.fla chunk_gdn2, bounded.fwd_graph_ms" as g,
    "peers.fla chunk_gdn2, bounded, kept.fwd_bwd_graph_ms" as gb from rows where op <> 'kda')
select shape as "B × H × T", printf('%.2f / %.2f', fwd_graph_ms, fwd_bwd_graph_ms) as ours, printf('%.2f / %.2f', f, fb) as peer,
  printf('%.2f / %.2f', f / fwd_graph_ms, fb / fwd_bwd_graph_ms) as "peer ÷ ours",
  printf('%.2f / %.2f', g / fwd_graph_ms, gb / fwd_bwd_graph_ms) as "`safe_gate` ÷ ours" from cells

-- kda_decays_h200: reproductions/measured/kda_decays_h200.csv
with cells as (select *, printf('%d × %d × %d', "shape.B", "shape.H", "shape.T") as shape, "peers.fla chunk_kda.fwd_graph_ms" as f,
    "peers.fla chunk_kda.fwd_bwd_graph_ms" as fb, "peers.fla chunk_kda, bounded.fwd_graph_ms" as g,
    "peers.fla chunk_kda, bounded, kept.fwd_bwd_graph_ms" as gb from rows)
select decays, shape as "B × H × T", printf('%.2f / %.2f', fwd_graph_ms, fwd_bwd_graph_ms) as ours, printf('%.2f / %.2f', f, fb) as peer,
  printf('%.2f / %.2f', f / fwd_graph_ms, fb / fwd_bwd_graph_ms) as "peer ÷ ours",
  case decays when 'bounded' then printf('%.2f / %.2f', g / fwd_graph_ms, gb / fwd_bwd_graph_ms) else '–' end as "`safe_gate` ÷ ours" from cells

-- decays_ops_h200: reproductions/measured/decays_ops_h200.csv
with first as (select *, rowid as n, decays + 0 as kind from rows where decays + 0 in (-0.05, -5, -20) and "case" <> 'fp32')
select op, printf('%d × %d × %d', B, H, T) || iif("case" = 'packed', ', packed', '') as "B × H × T", printf('%d, %d', K, V) as "K, V",
  max(case kind when -0.05 then printf('%.2f / %.2f', forward_ms, both_ms) end) as "gentle, ms",
  max(case kind when -5 then printf('%.2f / %.2f', forward_ratio, both_ratio) end) as "−5 a step",
  max(case kind when -20 then printf('%.2f / %.2f', forward_ratio, both_ratio) end) as "−20"
from first group by op, "case" order by min(n)

-- decays_training: reproductions/measured/decays_training_h200.csv
select case model when 'kda_hybrid' then 'KDA 3:1' when 'gla' then 'GLA' when 'hgrn2' then 'HGRN2' else 'Gated DeltaNet-2' end
    as model, upper(size) as size, printf('%,d', max(case decays when 'gentle' then tokens_per_second end)) as "tokens/s, log decays near −0.05",
  printf('%,d', max(case decays when 'recorded' then tokens_per_second end)) as "recorded decays",
  printf('%.2f', 1.0 * max(case decays when 'recorded' then tokens_per_second end) / max(case decays when 'gentle' then tokens_per_second end)) as ratio
from rows group by model, size order by min(rowid)

-- delta_family_h100: reproductions/measured/delta_family_h100.csv
select op, printf('%.3f / %.3f', fwd_graph_ms, fwd_bwd_graph_ms) as ours,
  printf('%.3f / %.3f', coalesce("peers.fla chunk_comba.fwd_graph_ms", "peers.fla chunk_gated_delta_product.fwd_graph_ms"),
    coalesce("peers.fla chunk_comba.fwd_bwd_graph_ms", "peers.fla chunk_gated_delta_product.fwd_bwd_graph_ms")) as peer,
  printf('%.2f / %.2f', coalesce("peers.fla chunk_comba.fwd_graph_ratio", "peers.fla chunk_gated_delta_product.fwd_graph_ratio"),
    coalesce("peers.fla chunk_comba.fwd_bwd_graph_ratio", "peers.fla chunk_gated_delta_product.fwd_bwd_graph_ratio"))
    as "peer ÷ ours"
from rows

-- deterministic_h200: reproductions/measured/deterministic_h200.csv
select what, batch, how, printf('%.2f', default_ms) as "default, ms", printf('%.2f', ms) as "deterministic, ms",
  printf('%.2f', ms / default_ms) as cost
from (select min(rowid) as place, what, batch, how, avg(case mode when 'default' then cast(ms as real) end) as default_ms,
  avg(case mode when 'deterministic' then cast(ms as real) end) as ms from rows group by what, batch, how) order by place

-- on_policy_cpu: reproductions/measured/on_policy_cpu.csv
select precision, case deterministic when 'True' then 'deterministic' else 'default' end as mode, count(distinct seed) as seeds, steps,
  printf('%.2f', avg(case when cast(step as int) < 10 then reward end)) as "reward at first",
  printf('%.2f', avg(case when cast(step as int) >= steps - 10 then reward end)) as "at last",
  case max(cast(kl as real)) when 0 then '0' else printf('%.0e', max(cast(kl as real))) end as "largest KL",
  case max(cast(largest_difference as real)) when 0 then '0' else printf('%.0e', max(cast(largest_difference as real))) end
    as "largest Δ log p"
from rows join (select policy_rate, count(distinct step) as steps from rows group by policy_rate) using (policy_rate)
  group by policy_rate, precision, deterministic order by cast(policy_rate as real), precision desc, deterministic desc

-- on_policy_h200: reproductions/measured/on_policy_h200.csv
select printf('%.0e', policy_rate) as "rate", precision, case deterministic when 'True' then 'deterministic' else 'default' end as mode, count(distinct seed) as seeds, steps,
  printf('%.2f', avg(case when cast(step as int) < 10 then reward end)) as "reward at first",
  printf('%.2f', avg(case when cast(step as int) >= steps - 10 then reward end)) as "at last",
  case max(cast(kl as real)) when 0 then '0' else printf('%.0e', max(cast(kl as real))) end as "largest KL",
  case max(cast(largest_difference as real)) when 0 then '0' else printf('%.0e', max(cast(largest_difference as real))) end
    as "largest Δ log p"
from rows join (select policy_rate, count(distinct step) as steps from rows group by policy_rate) using (policy_rate)
  group by policy_rate, precision, deterministic order by cast(policy_rate as real), precision desc, deterministic desc

-- scaling_h200: reproductions/measured/scaling_h200.csv
select 'Gated DeltaNet ' || upper(model) as "tokens/s, part of four times one GPU",
  max(case way when 'ddp' then printf('%.0fk, %.0f %%', tokens_per_second / 1e3, 25.0 * tokens_per_second / one) end) as "DDP",
  max(case way when 'zero1' then printf('%.0fk, %.0f %%', tokens_per_second / 1e3, 25.0 * tokens_per_second / one) end) as "ZeRO 1",
  max(case way when 'zero2' then printf('%.0fk, %.0f %%', tokens_per_second / 1e3, 25.0 * tokens_per_second / one) end) as "ZeRO 2",
  max(case way when 'zero3' then printf('%.0fk, %.0f %%', tokens_per_second / 1e3, 25.0 * tokens_per_second / one) end) as "ZeRO 3"
from rows join (select model, tokens_per_second as one from rows where devices = 1) using (model)
  where devices = 4 and model in ('400m', '1.5b') group by model order by batch_size desc

-- fsdp_h200: reproductions/measured/fsdp_h200.csv
select case way when 'ddp' then 'DDP' when 'fsdp' then 'FSDP2' when 'zero2' then 'ZeRO 2' else way end as strategy,
  printf('%.0fk, %.0f %%', tokens_per_second / 1e3, 100 * efficiency) as "tokens/s, part of the ideal",
  printf('%.1f', peak_gib) as "GiB on each GPU" from rows

-- context_parallel_h100: reproductions/measured/context_parallel_h100.csv
select printf('%dk%s, %s', length / 1024, iif(checkpointing, ', checkpointing', ''), layout) as "a sequence of",
  printf('%.0fk', max(case gpus when 1 then tokens_per_second end) / 1e3) || iif(max(note) <> '', ' (eager)', '') as "tokens/s, one GPU",
  printf('%.0fk, %.0f %%', max(case gpus when 2 then tokens_per_second end) / 1e3, 50 * max(case gpus when 2 then tokens_per_second end)
    / max(case gpus when 1 then tokens_per_second end)) as "tokens/s on two GPUs, efficiency",
  printf('%.1f, %.1f', max(case gpus when 1 then peak_gib end), max(case gpus when 2 then peak_gib end)) as "GiB, one and two GPUs"
from rows group by length, layout order by length, layout desc

-- servers: docs/servers.csv
select '`' || family || '`' as family, vllm as "vLLM", sglang as "SGLang" from rows

-- needles_h200: reproductions/measured/needles_h200.csv
with by_seed as (select * from rows where depth is null order by seed)
select model,
  group_concat(case when task = 's_niah_1' and length = 1024 then printf('%.0f', 100.0 * right / samples) end, ' ') as "noise (S-NIAH-1) 1k",
  group_concat(case when task = 's_niah_1' and length = 4096 then printf('%.0f', 100.0 * right / samples) end, ' ') as "noise 4k",
  group_concat(case when task = 's_niah_1' and length = 8192 then printf('%.0f', 100.0 * right / samples) end, ' ') as "noise 8k",
  group_concat(case when task = 's_niah_2' and length = 1024 then printf('%.0f', 100.0 * right / samples) end, ' ') as "text (S-NIAH-2) 1k",
  group_concat(case when task = 's_niah_2' and length = 2048 then printf('%.0f', 100.0 * right / samples) end, ' ') as "text 2k",
  group_concat(case when task = 's_niah_2' and length = 4096 then printf('%.0f', 100.0 * right / samples) end, ' ') as "text 4k",
  group_concat(case when task = 's_niah_3' and length = 512 then printf('%.0f', 100.0 * right / samples) end, ' ') as "uuid (S-NIAH-3) 512",
  group_concat(case when task = 's_niah_3' and length = 1024 then printf('%.0f', 100.0 * right / samples) end, ' ') as "uuid 1k",
  group_concat(case when task = 's_niah_3' and length = 2048 then printf('%.0f', 100.0 * right / samples) end, ' ') as "uuid 2k"
from by_seed group by model

-- performance.run: reproductions/measured/performance_kernels.csv
select distinct device || ', torch ' || torch || coalesce(', Triton ' || triton, '') || coalesce(', FLA ' || fla, '') || ', ' || date ||
  ', commit ' || "commit" from rows

-- performance.kernels: reproductions/measured/performance_kernels.csv
select case op when 'delta_rule' then 'delta rule with gate' when 'linear_head' then 'decay per head and step'
  when 'linear_channel' then 'decay per key channel' else 'constant decay' end as op,
  printf('(%d, %d, %d, %d)', "shape.B", "shape.H", "shape.T", "shape.D") as "(B, H, T, D)",
  formatted('%.3f / %.3f', field(rowid, 'fwd_graph_ms'), field(rowid, 'fwd_bwd_graph_ms')) as "this project, ms",
  formatted('%.3f / %.3f', field(rowid, 'peers.fla *.fwd_graph_ms'),
    field(rowid, 'peers.fla *.fwd_bwd_graph_ms')) as "FLA, ms",
  formatted('%.2f / %.2f', field(rowid, 'peers.fla *.fwd_graph_ratio'),
    field(rowid, 'peers.fla *.fwd_bwd_graph_ratio')) as ratio,
  formatted('%.2f / %.2f', field(rowid, 'peers.fla *.fwd_ratio'),
    field(rowid, 'peers.fla *.fwd_bwd_ratio')) as "ratio of calls"
from rows

-- performance.flashqla_run: reproductions/measured/performance_flashqla.csv
select distinct device || ', FlashQLA ' || flash_qla || ', ' || date || ', commit ' || "commit" from rows

-- performance.flashqla: reproductions/measured/performance_flashqla.csv
select printf('(%d, %d, %d, %d)', "shape.B", "shape.H", "shape.T", "shape.D") as "(B, H, T, D)",
  key_heads as "key heads",
  formatted('%.3f / %.3f', field(rowid, 'fwd_graph_ms'), field(rowid, 'fwd_bwd_graph_ms')) as "this project, ms",
  formatted('%.3f / %.3f', field(rowid, 'peers.flash_qla*.fwd_graph_ms'),
    field(rowid, 'peers.flash_qla*.fwd_bwd_graph_ms')) as "FlashQLA, ms",
  formatted('%.2f / %.2f', field(rowid, 'peers.flash_qla*.fwd_graph_ratio'),
    field(rowid, 'peers.flash_qla*.fwd_bwd_graph_ratio')) as ratio,
  formatted('%.2f / %.2f', field(rowid, 'peers.flash_qla*.fwd_ratio'),
    field(rowid, 'peers.flash_qla*.fwd_bwd_ratio')) as "ratio of calls"
from rows

-- performance.attention: reproductions/measured/performance_attention.csv
select printf('(%d, %d, %d, %d)', "shape.B", "shape.H", "shape.T", "shape.D") as "(B, H, T, D)",
  formatted('%.3f / %.3f', field(rowid, 'fwd_graph_ms'), field(rowid, 'fwd_bwd_graph_ms')) as "this project, ms",
  formatted('%.3f / %.3f', field(rowid, 'peers.cudnn*.fwd_graph_ms'),
    field(rowid, 'peers.cudnn*.fwd_bwd_graph_ms')) as "cuDNN, ms",
  formatted('%.2f / %.2f', field(rowid, 'peers.cudnn*.fwd_graph_ratio'),
    field(rowid, 'peers.cudnn*.fwd_bwd_graph_ratio')) as ratio,
  formatted('%.2f / %.2f', field(rowid, 'peers.cudnn*.fwd_ratio'),
    field(rowid, 'peers.cudnn*.fwd_bwd_ratio')) as "ratio of calls"
from rows where job = 'full'

-- performance.loss: reproductions/measured/performance_loss.csv
select case implementation when 'ours' then 'this project' else 'PyTorch, all logits' end as loss,
  printf('%d × %d, %d entries', tokens, hidden_size, vocab_size) as "tokens × width, vocabulary",
  formatted('%.1f', ms) as ms, formatted('%.1f', field(rowid, 'graph_ms')) as "ms with CUDA graphs",
  formatted('%.1f GiB', gib) as memory
from rows

-- performance.training: reproductions/measured/performance_training.csv
with lines(place, step, job, peer) as (values (1, 'eager', 'fla', 0), (2, 'FLA, next to eager', 'fla', 1),
    (3, 'captured as CUDA graphs', 'captured_beside_fla', 0), (4, 'FLA, next to captured', 'captured_beside_fla', 1)),
  timed as (select *, model like 'fla %' as peer from rows where field(rowid, 'not_captured') is null)
select step, formatted('%.1f', step_ms) as "ms a step", formatted('%.1fk', tokens_per_second / 1e3) as "tokens/s",
  formatted('%.2f', tokens_per_second / (select tokens_per_second from timed as other
    where other.peer and other.job = lines.job)) as "relative to FLA",
  formatted('%.1f GiB', peak_gib) as memory, formatted('%.1f s', first_step_s) as "first step"
from lines left join timed using (job, peer) order by place

-- performance.decode: reproductions/measured/performance_decode.csv
with timed as (select batch_size, case when model like 'fla %' then 'FLA' else how end as kind, ms from rows),
  batches as (select batch_size, median(case kind when 'CUDA graph' then ms end) as captured,
    median(case kind when 'eager' then ms end) as eager, median(case kind when 'FLA' then ms end) as fla
    from timed group by batch_size)
select batch_size as batch, formatted('%.3f ms', captured) as "CUDA graph", formatted('%.1f ms', eager) as eager,
  formatted('%.1f ms', fla) as FLA, formatted('%.0f', 1e3 * batch_size / captured) as "tokens/s, CUDA graph",
  formatted('%.0f', 1e3 * batch_size / fla) as "tokens/s, FLA", formatted('%.1f', fla / captured) as ratio
from batches

-- performance.expansion: reproductions/measured/performance_expansion.csv
with of as (select case job when 'gated_deltanet' then 'Gated DeltaNet' when 'gla' then 'GLA'
      when 'gla_recompute_states' then 'GLA, `recompute: states`'
      when 'gated_deltanet_recompute_states' then 'Gated DeltaNet, `recompute: states`' end as model, factor, avg(tokens_per_second) / 1e3 as speed, avg(of_one) as of_one,
    max(peak_gib) as gib, max(gib_of_one) as gib_of_one from rows group by job, factor),
  both as (select model, 0 as place, 'tokens/s' as measured, factor,
      case factor when 1 then formatted('%.1fk', speed) else formatted('%.2f (%.1fk)', of_one, speed) end as value from of
    union all select model, 1, 'memory', factor,
      case factor when 1 then formatted('%.1f GiB', gib) else formatted('%.2f (%.1f GiB)', gib_of_one, gib) end from of)
select model || ', ' || measured as "relative to E = 1", max(case factor when 1 then value end) as "E = 1",
  max(case factor when 2 then value end) as "E = 2", max(case factor when 4 then value end) as "E = 4",
  max(case factor when 8 then value end) as "E = 8"
from both group by model, place

-- broken_kernels_h100: reproductions/measured/broken_kernels_h100.csv
select fault, "found by" from rows where fault != 'none' and fault not like 'no fault%' order by fault

-- proofs_cpu: reproductions/measured/proofs_cpu.csv
select iif(kind = 'ops', substr(subject, 1, instr(subject, ' (') - 1), iif(subject like '%.yaml', 'hybrids', 'mixers')) as "op",
  errors(dtype, says) filter (where "check" = 'causal') as "causal",
  errors(dtype, says) filter (where "check" = 'rows') as "rows",
  errors(dtype, says) filter (where "check" = 'packed') as "packed",
  errors(dtype, says) filter (where "check" = 'invariant') as "invariant",
  errors(dtype, says) filter (where "check" = 'pieces') as "pieces",
  errors(dtype, says) filter (where "check" = 'gates') as "gates",
  errors(dtype, says) filter (where "check" = 'repeats') as "repeats"
from rows where kind in ('ops', 'layers') group by 1 having errors(dtype, says) <> 'exact' order by min(rowid)

-- proofs_h200: reproductions/measured/proofs_h200.csv
select iif(kind = 'ops', substr(subject, 1, instr(subject, ' (') - 1), iif(subject like '%.yaml', 'hybrids', 'mixers')) as "op",
  errors(dtype, says) filter (where "check" = 'causal') as "causal",
  errors(dtype, says) filter (where "check" = 'rows') as "rows",
  errors(dtype, says) filter (where "check" = 'packed') as "packed",
  errors(dtype, says) filter (where "check" = 'invariant') as "invariant",
  errors(dtype, says) filter (where "check" = 'sampled') as "sampled",
  errors(dtype, says) filter (where "check" = 'pieces') as "pieces",
  errors(dtype, says) filter (where "check" = 'gates') as "gates",
  errors(dtype, says) filter (where "check" = 'repeats') as "repeats"
from rows where kind = 'layers' or (kind = 'ops' and (subject like '%triton' or subject like 'window_attention%'))
  group by 1 having errors(dtype, says) <> 'exact' order by min(rowid)

-- families: families
select '`' || family || '`' as family, reads, writes, gguf as "GGUF", configs as "configs, logits compared" from rows

-- recall.state: reproductions/measured/state_h200.csv
with runs as (select coalesce(mixer, control) as name, "model.stack.mixer.factor" as factor, learning_rate as rate, seed,
    state_size, val_accuracy, "val_accuracy_by_task.pairs_4" as p4, "val_accuracy_by_task.pairs_16" as p16, "val_accuracy_by_task.pairs_32" as p32,
    "val_accuracy_by_task.pairs_64" as p64, "val_accuracy_by_task.pairs_128" as p128 from rows order by seed),
  cells as (select *, group_concat(printf('%.2f', p32), ' ') as a32, group_concat(printf('%.2f', p64), ' ') as a64,
    group_concat(printf('%.2f', p128), ' ') as a128, max(state_size) as size,
    median(pairs_at(0.9, '4 16 32 64 128', p4, p16, p32, p64, p128)) as at90,
    median(pairs_at(0.5, '4 16 32 64 128', p4, p16, p32, p64, p128)) as at50,
    row_number() over (partition by name, factor order by min(p4) < 0.95, median(val_accuracy) desc) as place
    from runs group by name, factor, rate)
select name || case when factor is null then '' else ', E = ' || factor end as mixer,
  case when factor is null then null else printf('%,d', size) end as "state of a sequence", a32 as "32 pairs", a64 as "64 pairs",
  a128 as "128 pairs", case when at90 > 1e9 then 'all' else printf('%.0f', at90) end as "pairs at 90 %"
from cells where place = 1 and name != 'HGRN2' and not (name = 'Gated DeltaNet, long head' and factor = 1)
order by instr('Gated DeltaNet, subheads Gated DeltaNet, long head no decay, subheads GLA Mamba2 attention', name), factor

-- delta_family_recall_h100: reproductions/measured/delta_family_recall_h100.csv
with runs as (select mixer as name, "model.stack.mixer.factor" as factor, learning_rate as rate, seed, parameters,
    state_size, val_accuracy, "val_accuracy_by_task.pairs_4" as p4, "val_accuracy_by_task.pairs_16" as p16, "val_accuracy_by_task.pairs_32" as p32,
    "val_accuracy_by_task.pairs_64" as p64, "val_accuracy_by_task.pairs_128" as p128 from rows order by seed),
  cells as (select *, group_concat(printf('%.2f', p32), ' ') as a32, group_concat(printf('%.2f', p64), ' ') as a64,
    group_concat(printf('%.2f', p128), ' ') as a128, count(*) as n,
    median(pairs_at(0.9, '4 16 32 64 128', p4, p16, p32, p64, p128)) as at90,
    row_number() over (partition by name, factor order by min(p4) < 0.95, median(val_accuracy) desc) as place
    from runs group by name, factor, rate)
select name || ', E = ' || factor as mixer, printf('%,d', parameters) as parameters,
  printf('%g', rate) as "learning rate", a64 as "64 pairs", a128 as "128 pairs",
  case when at90 > 1e9 then 'all' else printf('%.0f', at90) end as "pairs at 90 %"
from cells where place = 1 and n = 3 order by instr('Gated DeltaNet KDA Gated DeltaNet-2 Comba Gated DeltaProduct, 2 steps', name), factor

-- newer_mixers_recall_h200: reproductions/measured/newer_mixers_recall_h200.csv
with runs as (select coalesce(mixer, control) as name, learning_rate as rate, seed, parameters,
    state_size, val_accuracy, "val_accuracy_by_task.pairs_4" as p4, "val_accuracy_by_task.pairs_16" as p16, "val_accuracy_by_task.pairs_32" as p32,
    "val_accuracy_by_task.pairs_64" as p64, "val_accuracy_by_task.pairs_128" as p128 from rows order by seed),
  cells as (select *, group_concat(printf('%.2f', p4), ' ') as a4, group_concat(printf('%.2f', p32), ' ') as a32, group_concat(printf('%.2f', p64), ' ') as a64,
    group_concat(printf('%.2f', p128), ' ') as a128,
    median(pairs_at(0.9, '4 16 32 64 128', p4, p16, p32, p64, p128)) as at90,
    row_number() over (partition by name order by min(p4) < 0.95, median(val_accuracy) desc) as place
    from runs group by name, rate)
select name as mixer, printf('%,d', parameters) as parameters, printf('%,d', state_size) as "state of a sequence",
  printf('%g', rate) as "learning rate", a4 as "4 pairs", a32 as "32 pairs", a64 as "64 pairs", a128 as "128 pairs",
  case when at90 > 1e9 then 'all' else printf('%.0f', at90) end as "pairs at 90 %"
from cells where place = 1 order by state_size > 10000, instr('Gated DeltaNet RWKV-7 mLSTM gated slot attention Mamba-3 attention gated attention latent attention forgetting attention', name)

-- miniature: reproductions/measured/miniature.csv
select replace(substr(name, instr(name, 'mixer=') + 6), ',seed=0', '') as "validation loss",
  printf('%.3f', max(case when name like 'size=1M,%' then val_loss end)) as "1M",
  printf('%.3f', max(case when name like 'size=2M,%' then val_loss end)) as "2M",
  printf('%.3f', max(case when name like 'size=5M,%' then val_loss end)) as "5M",
  printf('%.3f', max(case when name like 'size=11M,%' then val_loss end)) as "11M",
  printf('%.3f', max(case when name like 'size=22M,%' then val_loss end)) as "22M",
  printf('%.3f', max(case when name like 'size=39M,%' then val_loss end)) as "39M"
from rows group by 1 order by 7

-- state_tracking_h100: reproductions/measured/state_tracking_h100.csv
with cells as (select model, "group", learning_rate as rate, max(parameters) as parameters,
    group_concat(printf('%.2f', "val_accuracy_by_task.length_512"), ' ') as at512,
    group_concat(printf('%.2f', "val_accuracy_by_task.length_128"), ' ') as at128, max("val_accuracy_by_task.length_512") as best,
    row_number() over (partition by model, "group" order by median("val_accuracy_by_task.length_512") desc) as place
    from (select * from rows order by seed) group by model, "group", rate)
select model, "group", printf('%.0f k', parameters / 1e3) as parameters, at512 as "512 tokens", at128 as "128 tokens" from cells where place = 1
order by instr('parity S3 A5', "group"), model like 'DeltaProduct%', model like 'KDA%', model

-- state_tracking_newer_h200: reproductions/measured/state_tracking_newer_h200.csv
with cells as (select model, "group", learning_rate as rate, max(parameters) as parameters,
    group_concat(printf('%.2f', "val_accuracy_by_task.length_512"), ' ') as at512,
    group_concat(printf('%.2f', "val_accuracy_by_task.length_128"), ' ') as at128, max("val_accuracy_by_task.length_512") as best,
    row_number() over (partition by model, "group" order by median("val_accuracy_by_task.length_512") desc) as place
    from (select * from rows order by seed) group by model, "group", rate)
select model, "group", at512 as "512 tokens", at128 as "128 tokens" from cells where place = 1 and "group" <> 'A5'
order by instr('parity S3 A5', "group"), instr('Gated DeltaNet, β to 2 RWKV-7 Mamba-3 mLSTM gated slot attention forgetting attention latent attention', model)

-- statex_h200: reproductions/measured/statex_h200.csv
with a as (select * from rows order by seed)
select form, group_concat(case when mixer = 'GLA' and task = 'passkey' and length = 8192 then printf('%.2f', accuracy) end, ' ')
    as "passkeys at 8k, GLA",
  group_concat(case when mixer = 'Mamba2' and task = 's_niah_2' and length = 2048 then printf('%.2f', accuracy) end, ' ')
    as "needles at 2k, Mamba2"
from a group by form order by instr('original LPT reinit inherit preserve', form)

-- mixers_400m: reproductions/measured/mixers_400m.csv
select '`' || model || '.yaml`' as model, printf('%.2fM', state / 1e6) as "numbers of state at 4,096 tokens",
  printf('%.2f', gflops) as "GFLOP a token",
  case when tokens_per_second then printf('%.0fk', tokens_per_second / 1e3) || iif(batch_size < 8, printf(' (%d)', batch_size), '') end
  as "tokens/s in training" from rows order by tokens_per_second is null, tokens_per_second desc, grows, state

-- decode_400m: reproductions/measured/decode_400m.csv
with models as (select model, max(case batch_size when 1 then ratio end) as one,
  printf('`%s` %.1f/%.1f', model, max(case batch_size when 1 then ratio end), max(case batch_size when 64 then ratio end)) as cell
  from rows where position = 1024 and model not like 'fla %' group by model)
select case when one <= 4 then 'at most 4' when one <= 6 then '4 to 6' when one <= 12 then '6 to 12' else 'above 12' end as "times the floor",
  group_concat(cell, ', ') as "models: batch 1/64" from (select * from models order by one) group by 1 order by min(one)

-- peers_400m: reproductions/measured/peers_400m.csv
with runs as (select model, length, max(batch_size) as batch, max(case how when 'captured' then tokens_per_second end) as captured,
    max(case how when 'eager' then tokens_per_second end) as eager,
    max(case when how not in ('captured', 'eager') then tokens_per_second end) as peer,
    max(case when how not in ('captured', 'eager') then how end) like 'transformers%' as hf from rows group by model, length),
  cells as (select *, printf('%.0f, %.0f, %.0f', captured / 1e3, eager / 1e3, peer / 1e3) || iif(batch < 8, printf(' (%d)', batch), '') as speed,
    printf('%.2f', 1.0 * captured / peer) as ratio from runs where peer is not null)
select '`' || replace(model, ' without MLPs', '') || '.yaml`' || iif(max(hf), '*', '') || iif(model like '% MLPs', ', without MLPs', '') as model, max(case length when 4096 then speed end) as "8 × 4,096",
  max(case length when 4096 then ratio end) as ratio, max(case length when 2048 then speed end) as "8 × 2,048",
  max(case length when 2048 then ratio end) as "ratio " from cells group by model order by min(case length when 4096 then ratio end)

-- which_mixer.recall: reproductions/measured/state_h200.csv
with runs as (select coalesce(mixer, control) as name, "model.stack.mixer.factor" as factor, learning_rate as rate, seed,
    state_size, val_accuracy, "val_accuracy_by_task.pairs_4" as p4, "val_accuracy_by_task.pairs_16" as p16, "val_accuracy_by_task.pairs_32" as p32,
    "val_accuracy_by_task.pairs_64" as p64, "val_accuracy_by_task.pairs_128" as p128 from rows order by seed),
  cells as (select *, group_concat(printf('%.2f', p32), ' ') as a32, group_concat(printf('%.2f', p64), ' ') as a64,
    group_concat(printf('%.2f', p128), ' ') as a128, max(state_size) as size,
    median(pairs_at(0.9, '4 16 32 64 128', p4, p16, p32, p64, p128)) as at90,
    median(pairs_at(0.5, '4 16 32 64 128', p4, p16, p32, p64, p128)) as at50,
    row_number() over (partition by name, factor order by min(p4) < 0.95, median(val_accuracy) desc) as place
    from runs group by name, factor, rate)
select name as mixer, group_concat(case factor when 1 then case when at90 > 1e9 then 'all' else printf('%.0f', at90) end || ', ' || case when at50 > 1e9 then 'all' else printf('%.0f', at50) end end) as "state 4,096: at 90 %, at 50 %",
  group_concat(case factor when 2 then case when at90 > 1e9 then 'all' else printf('%.0f', at90) end end) as "8,192", group_concat(case factor when 4 then case when at90 > 1e9 then 'all' else printf('%.0f', at90) end end) as "16,384",
  group_concat(case when factor = 8 or factor is null then case when at90 > 1e9 then 'all' else printf('%.0f', at90) end end) as "32,768: at 90 %"
from cells where place = 1 and name != 'HGRN2' group by name
order by instr('Gated DeltaNet, subheads Gated DeltaNet, long head no decay, subheads GLA Mamba2 attention', name)

-- zoo.mixers: mixers
select '`' || name || '`' as mixer, tex(recurrence) as recurrence, paper as source from rows
  order by case kind when 'matrix' then 0 when 'other' then 1 else 2 end, name

-- zoo.compare: reproductions/measured/compare_cpu.csv
select name as config, printf('%.2f M', parameters / 1e6) as parameters, printf('%.0f k', state_size / 1e3) as state,
  printf('%.3f', val_loss) as "validation loss",
  printf('%.3f', word(val_loss_by_position, -1)) as "end of the context" from rows
union all select 'bigram model', null, null, printf('%.3f', max(bigram_loss)), null from rows order by 4

-- needles_smollm2_cpu: reproductions/measured/needles_smollm2_cpu.csv
select '`' || task || '`' as task, replace(group_concat(distinct pairs), ',', ' or ') as pairs,
  printf('%.0f %%', 100 * max(case length when 256 then accuracy end)) as "256 tokens",
  printf('%.0f %%', 100 * max(case length when 1024 then accuracy end)) as "1,024 tokens"
from rows where length > 64 and (task != 'mqar' or pairs = 8) group by task order by min(rowid)

-- linearise_forecast: reproductions/measured/linearise_forecast.csv
select substr(student, 1, instr(student, ',') - 1) as teacher, printf('%.2fB', max(parameters) / 1e9) as student,
  printf('%.0fM', sum(tokens) / 1e6) as tokens, printf('%.0f GiB', max(cast(gib as real))) as memory,
  printf('%.1f', sum(hours)) as hours
from rows group by student order by min(parameters)
