// What the gateway answers: GET /ui/session, /admin/fleet, /admin/events, /v1/models and the admin API.

export interface Session {
  user: string;
  team: string;
  role: "admin" | "manager" | "user";
  has_accounts: boolean;
  links: Record<string, string>;
  is_open: boolean;
}

export interface GatewayRow {
  seen_s_ago: number;
}

export interface ModelRow {
  kind: string;
  status: "unloaded" | "loading" | "loaded" | "failed" | "sleeping";
  is_on_demand: boolean;
  progress: number | null;
  why: string;
  retry_at: number;
  num_workers: number;
  slots: number;
  slots_busy: number;
  waiting: number | null;
  predicted_wait_s: number;
  aliases: string[];
  memory: Record<string, MemoryRow>;
}

export interface DeviceRow {
  id: string;
  total_bytes: number;
  free_bytes: number;
  planned_bytes: number;
}

export interface MachineRow {
  is_leaving: boolean;
  devices: DeviceRow[];
  workers: { worker: string; model: string; status: string; bytes: Record<string, number> }[];
  failures: Record<string, string>;
}

export interface MemoryRow {
  predicted: number;
  weights: number;
  cells: number;
  compute: number;
  other: number;
  growth: number;
  taken: number | null;
}

export interface WishedPlan {
  kept_by: "demand" | "supervisor" | "nobody";
  num_workers: number;
  num_running: number;
  num_waiting: number;
  is_possible: boolean;
  sentences: string[];
}

export interface WorkerRow {
  model: string;
  address: string;
  started_at: number;
  is_draining: boolean;
  slots: number;
  slots_busy: number;
  waiting: number;
  n_ctx: number;
  kv_tokens: number;
  kv_tokens_used: number;
  backlog_tokens: number;
  prefill_ms: number;
  decode_ms: number;
  preempted: number;
  adapters: string[];
  adapters_resident: string[];
  cache_ram_bytes: number;
  cache_disk_bytes: number;
  circuit: "" | "open" | "half_open";
}

export interface SlotRow {
  is_busy: boolean;
  team: string;
  request_id: string;
  prompt_tokens: number;
  answer_tokens: number;
  max_tokens: number;
}

export interface CallRow {
  request_id: string;
  team: string;
  key: string;
  alias: string;
  model: string;
  gateway: string;
  worker: string;
  status: "waiting" | "running";
  since: number;
  position: number;
  predicted_wait_s: number;
  priority: number;
  num_answers: number;
}

export interface CallsAnswer {
  data: CallRow[];
  silent: string[];
}

export interface Overview {
  at: number;
  version: string;
  gateway: string;
  redis_up: boolean;
  catalog_fault: string;
  gateways: Record<string, GatewayRow>;
  models: Record<string, ModelRow>;
  workers: Record<string, WorkerRow>;
  machines: Record<string, MachineRow>;
}

/** New rows are whole; of others there are only the fields that have changed; null: the row is gone. */
export interface Changes {
  at: number;
  redis_up?: boolean;
  catalog_fault?: string;
  gateways?: Record<string, Partial<GatewayRow> | null>;
  models?: Record<string, Partial<ModelRow> | null>;
  workers?: Record<string, Partial<WorkerRow> | null>;
  machines?: Record<string, Partial<MachineRow> | null>;
}

export type Slots = Record<string, SlotRow[]>;

export interface CatalogAnswer {
  file: string | null;
  fault: string | null;
  text?: string;
  digest?: string;
  unwritable?: string | null;
}

export type CatalogChanges = Partial<Record<"added" | "removed" | "changed", string[]>>;

export interface CatalogCheck {
  faults: { line: number; message: string }[];
  changes: Record<string, CatalogChanges>;
}

export interface CardStatus {
  value: string;
  failed?: boolean;
  reason?: string;
  progress?: { value: number };
}

export interface ModelCard {
  id: string;
  aliases?: string[];
  tags?: string[];
  parent?: string;
  architecture: { input_modalities: string[]; output_modalities: string[] };
  status: CardStatus;
  meta?: { n_ctx: number; n_ctx_train: number; n_params: number; size: number; n_vocab: number };
  workers?: number;
}

export interface ApiKey {
  name: string;
  team: string;
  user: string | null;
  role: string;
  blocked: boolean;
  expires_at: number | null;
  last_used_at: number | null;
  created_at: number;
  aliases: string[] | null;
}

export interface UsageSum {
  num_calls: number;
  num_failed: number;
  prompt_tokens: number;
  cached_tokens: number;
  completion_tokens: number;
  cost: number;
  [group: string]: number | string;
}

export interface Budget {
  kind: string;
  name: string;
  period: string;
  amount: number;
  spent: number;
  left: number;
}

export interface AuditEntry {
  number: number;
  at: number;
  actor: string;
  action: string;
  kind: string;
  subject: string;
  team: string;
}
