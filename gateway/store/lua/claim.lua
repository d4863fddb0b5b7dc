-- Makes a full lease of a grant.
--
--   ARGV[4]  id of the granted ticket
--   ARGV[5]  lifetime of the lease, ms
-- Result: {"lease", fence, worker, boot, address, how often the ticket was overtaken} | {"waiting"} (no grant, or it
--   came too late)
--
-- Keeps: an expired grant is never claimed: its ticket waits at its old place. Claiming twice is as claiming once.
local id, text = ARGV[4], call_read(ARGV[4])
local lease = lease_read(text)
if not lease or lease.gateway ~= GATEWAY then return {"waiting"} end
local reply
if (tonumber(call("ZSCORE", worker_leases_key(lease.worker), id)) or 0) <= now then
  lease_drop(lease.worker, id, lease)
  line()({lease.worker})
else
  reply = grant_claim(id, lease, text, tonumber(ARGV[5]))
end
ledger_save()
return reply or {"waiting"}
