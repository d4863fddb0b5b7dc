{{/* What a schema can't say; all that is wrong is told at once. */}}

{{- define "paddock.checks" -}}
{{- $wrong := list -}}
{{- $names := list -}}
{{- $slugs := list -}}
{{- $_ := include "paddock.firstModel" . -}}
{{- if not .Values.enabled -}}
{{- $wrong = append $wrong "enabled: false leaves nothing out unless the umbrella chart's dependency has it as its condition (`condition: paddock.enabled`); add that, or leave enabled out" -}}
{{- end -}}
{{- range $number, $entry := .Values.models -}}
{{- $model := include "paddock.model" (dict "root" $ "entry" $entry) | fromJson -}}
{{- $where := printf "models[%d] (%s)" $number $model.name -}}
{{- $sources := list -}}
{{- range list "hf" "path" "url" -}}{{- if get $model . -}}{{- $sources = append $sources . -}}{{- end -}}{{- end -}}
{{- if ne (len $sources) 1 -}}
{{- $wrong = append $wrong (printf "%s: give exactly one source: hf (REPO[:QUANT][@REVISION]), path (a GGUF file on the models' volume) or url" $where) -}}
{{- end -}}
{{- $cache := include "paddock.modelCache" (dict "root" $ "model" $model) | fromJson -}}
{{- if and $model.path (not (hasPrefix "/" $model.path)) (eq $cache.type "emptyDir") -}}
{{- $wrong = append $wrong (printf "%s: path: an empty volume holds no file; set modelCache.type to claim or existing" $where) -}}
{{- end -}}
{{- $draft := default dict (default dict $model.speculation).draft -}}
{{- if and $draft.hf (not $model.hf) -}}
{{- $wrong = append $wrong (printf "%s: speculation.draft.hf: it is fetched with a model of hf only; name its file by path" $where) -}}
{{- end -}}
{{- range $kind, $volume := dict "modelCache" $cache "promptCache" $model.promptCache -}}
{{- if and (eq $volume.type "existing") (not $volume.existingClaim) -}}
{{- $wrong = append $wrong (printf "%s: %s: name its claim in existingClaim" $where $kind) -}}
{{- end -}}
{{- end -}}
{{- if and (ne $model.promptCache.type "none") $.Values.secrets.existingSecret (not (has "cache-secret" $.Values.secrets.existingSecretHolds)) -}}
{{- $wrong = append $wrong (printf "%s: promptCache: workers that share files need one secret for them; give secrets.existingSecret a key cache-secret, and name it in secrets.existingSecretHolds" $where) -}}
{{- end -}}
{{- if has $model.name $names -}}
{{- $wrong = append $wrong (printf "%s: the name is used twice; rename one of the two" $where) -}}
{{- else if has (include "paddock.slug" $model.name) $slugs -}}
{{- $wrong = append $wrong (printf "%s: its objects would be named as another model's; rename one of the two" $where) -}}
{{- end -}}
{{- $names = append $names $model.name -}}
{{- $slugs = append $slugs (include "paddock.slug" $model.name) -}}
{{- $scaling := $model.autoscaling -}}
{{- if gt (int $scaling.min) (int $scaling.max) -}}
{{- $wrong = append $wrong (printf "%s: autoscaling: min is above max" $where) -}}
{{- end -}}
{{- if and (has $scaling.type (list "hpa" "cpu")) (lt (int $scaling.min) 1) -}}
{{- $wrong = append $wrong (printf "%s: autoscaling: only keda scales to zero; set min to 1, or type to keda" $where) -}}
{{- end -}}
{{- if and (eq $scaling.type "hpa") (not (regexMatch "^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$" $model.name)) -}}
{{- $wrong = append $wrong (printf "%s: autoscaling: hpa selects the metric by the model's name, which can't be a label's value; use keda, or another name" $where) -}}
{{- end -}}
{{- if and (eq $scaling.type "keda") (not $.Values.keda.prometheusAddress) -}}
{{- $wrong = append $wrong (printf "%s: autoscaling: keda.prometheusAddress is empty; name the Prometheus that scrapes the gateways" $where) -}}
{{- end -}}
{{- if and (eq $model.kind "Deployment") (eq (toString $model.rollout.maxSurge) "0") (eq (toString $model.rollout.maxUnavailable) "0") -}}
{{- $wrong = append $wrong (printf "%s: rollout: maxSurge and maxUnavailable can't both be 0" $where) -}}
{{- end -}}
{{- end -}}
{{- range $alias, $entry := .Values.aliases -}}
{{- $chain := ternary (dict "targets" (list $entry)) $entry (kindIs "string" $entry) -}}
{{- range $chain.targets -}}
{{- $target := ternary . (get (ternary dict . (kindIs "string" .)) "model") (kindIs "string" .) -}}
{{- if not (has $target $names) -}}
{{- $wrong = append $wrong (printf "aliases.%s: no model is named %s; use one of: %s" $alias $target (join ", " $names)) -}}
{{- end -}}
{{- end -}}
{{- range $chain.fallbacks -}}
{{- if not (or (has . $names) (hasKey $.Values.aliases .)) -}}
{{- $wrong = append $wrong (printf "aliases.%s: fallbacks: no model or alias is named %s" $alias .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $job, $name := .Values.default -}}
{{- if not (or (has $name $names) (hasKey $.Values.aliases $name)) -}}
{{- $wrong = append $wrong (printf "default.%s: no model or alias is named %s" $job $name) -}}
{{- end -}}
{{- end -}}
{{- if and (not .Values.redis.bundled) (not .Values.redis.external.url) (not (or .Values.redis.external.existingSecret .Values.secrets.existingSecret)) -}}
{{- $wrong = append $wrong "redis: not bundled, and no other is named: set redis.external.url or redis.external.existingSecret" -}}
{{- end -}}
{{- if and .Values.accounts.enabled (not .Values.postgres.bundled) (not (or .Values.postgres.external.existingSecret .Values.secrets.existingSecret)) -}}
{{- $wrong = append $wrong "postgres: not bundled, and no other is named: set postgres.external.existingSecret, whose key database-url holds its URL; or accounts.enabled to false" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- $wrong = append $wrong "httpRoute: name the Gateway that it hangs on in parentRefs" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- $wrong = append $wrong "ingress: name at least one host in hosts" -}}
{{- end -}}
{{- $scaling := .Values.gateway.autoscaling -}}
{{- if gt (int $scaling.min) (int $scaling.max) -}}
{{- $wrong = append $wrong "gateway.autoscaling: min is above max" -}}
{{- end -}}
{{- $patience := .Values.gateway.settings.start_timeout_s -}}
{{- if and $patience (gt (float64 $patience) (float64 (include "paddock.requestTimeout" .))) -}}
{{- $wrong = append $wrong "gateway.settings: start_timeout_s is longer than request_timeout_s, the longest life of a call" -}}
{{- end -}}
{{- if .Values.gateway.settings.uds -}}
{{- $wrong = append $wrong "gateway.settings.uds: the Service and the probes ask a port; leave it out" -}}
{{- end -}}
{{- $admin := int .Values.gateway.settings.admin_port -}}
{{- if eq $admin 8080 -}}
{{- $wrong = append $wrong "gateway.settings.admin_port: 8080 is the port of all callers; name another one, such as 8083" -}}
{{- end -}}
{{- if and $admin .Values.accounts.exposed -}}
{{- $wrong = append $wrong "accounts.exposed: what is for admins is at gateway.settings.admin_port only, which ingress and httpRoute do not lead to; leave one of the two out" -}}
{{- end -}}
{{- if $wrong -}}
{{- fail (printf "\n\n%s\n" (join "\n" $wrong)) -}}
{{- end -}}
{{- end -}}
