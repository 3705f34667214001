{{/* Checks that a schema cannot express. They fail before anything is installed and name the remedy. */}}
{{- define "pagemill.checks" -}}
{{- if and .Values.redis.keys (not (include "pagemill.hasRedis" .)) }}
{{- fail "redis.keys: it is true, so API keys are read from Redis, but no Redis is configured. Set redis.existingSecret or redis.bundled.enabled." }}
{{- end }}
{{- if and .Values.redis.bundled.enabled .Values.redis.existingSecret }}
{{- fail "redis: existingSecret and bundled.enabled are both set. Use your Redis or the chart's, not both." }}
{{- end }}
{{- if and .Values.redis.bundled.enabled (not .Values.redis.bundled.passwordSecret) }}
{{- fail (printf "redis.bundled.passwordSecret: it is empty, so any pod in the cluster could write the counters. Create a Secret: kubectl --namespace %s create secret generic pagemill-redis --from-literal=password=\"$(openssl rand -hex 32)\"" .Release.Namespace) }}
{{- end }}
{{- $hasKeys := or (include "pagemill.hasApiKeys" .) .Values.redis.keys }}
{{- if and (not .Values.gateway.auth.allowAnonymous) (not $hasKeys) }}
{{- fail (printf `

No API key is set, so the gateway would refuse every request. Choose one:

1. Create a Secret with the SHA-256 of each key that clients may use, and name it:
     kubectl --namespace %s create secret generic pagemill-api-keys \
       --from-literal=keys="$(printf %%s 'YOUR-KEY' | sha256sum | cut -d' ' -f1)"
     helm ... --set gateway.apiKeys.existingSecret=pagemill-api-keys
2. Serve every client that reaches the gateway, for a trial or behind your own authentication:
     helm ... --set gateway.auth.allowAnonymous=true
` .Release.Namespace) }}
{{- end }}
{{- if and .Values.gateway.auth.allowAnonymous $hasKeys }}
{{- fail "gateway.auth.allowAnonymous: it is true, and gateway.apiKeys names keys or redis.keys is set. Set only one of them." }}
{{- end }}
{{- if and .Values.gateway.apiKeys.existingSecret .Values.gateway.apiKeys.sha256 }}
{{- fail "gateway.apiKeys: existingSecret and sha256 are both set. Put all hashes into the Secret, or do not set existingSecret." }}
{{- end }}
{{- range $secret := list "control_token" "api_keys" }}
{{- if hasKey $.Values.gateway.settings $secret }}
{{- fail (printf "gateway.settings.%s: settings are stored in a ConfigMap, which many users can read. Remove it: the token of the control port comes from the operator's keys, and API keys from the Secret that gateway.apiKeys names." $secret) }}
{{- end }}
{{- end }}
{{- if contains "@" (dig "redis" "url" "" .Values.gateway.settings) }}
{{- fail "gateway.settings.redis.url: settings are stored in a ConfigMap, which many users can read. Put the URL with its password into a Secret and name it in redis.existingSecret." }}
{{- end }}
{{- $election := .Values.operator.leaderElection }}
{{- if not (and (lt (int $election.retryPeriodSeconds) (int $election.renewDeadlineSeconds)) (lt (int $election.renewDeadlineSeconds) (int $election.leaseDurationSeconds))) }}
{{- fail (printf "operator.leaderElection: retryPeriodSeconds (%d) must be less than renewDeadlineSeconds (%d), which must be less than leaseDurationSeconds (%d)." (int $election.retryPeriodSeconds) (int $election.renewDeadlineSeconds) (int $election.leaseDurationSeconds)) }}
{{- end }}
{{- $scaling := .Values.gateway.autoscaling }}
{{- if and $scaling.enabled (gt (int $scaling.minReplicas) (int $scaling.maxReplicas)) }}
{{- fail (printf "gateway.autoscaling: minReplicas (%d) is more than maxReplicas (%d)." (int $scaling.minReplicas) (int $scaling.maxReplicas)) }}
{{- end }}
{{- if and $scaling.enabled (not (int $scaling.targetCPUUtilizationPercentage)) (not $scaling.metrics) }}
{{- fail "gateway.autoscaling: it is enabled without a metric. Set targetCPUUtilizationPercentage or metrics." }}
{{- end }}
{{- if and .Values.monitoring.podMonitor.enabled .Values.monitoring.serviceMonitor.enabled }}
{{- fail "monitoring: podMonitor and serviceMonitor are both enabled, so everything would be scraped twice. Enable one." }}
{{- end }}
{{- if and .Values.gateway.httpRoute.enabled (not .Values.gateway.httpRoute.parentRefs) }}
{{- fail "gateway.httpRoute.parentRefs: it is empty, so the route would attach to nothing. Name a Gateway." }}
{{- end }}
{{- range list "operator" "gateway" "engine" "engineCpu" }}
{{- if not (or $.Values.global.imageRegistry (index $.Values.image .).registry) }}
{{- fail (printf "image.%s.registry: it is empty, and no images are published yet. Build and push them as docs/how-to/install-with-helm.md says, then set image.{operator,gateway,engine,engineCpu}.registry or global.imageRegistry." .) }}
{{- end }}
{{- end }}
{{- end -}}
