{{/*
The settings files of the operator and the gateway. Their fields are those of OperatorConfig and GatewayConfig, which
refuse unknown ones; `settings` of each component overrides everything else.
*/}}

{{- define "pagemill.operatorSettings" -}}
{{- $values := .Values.operator -}}
{{- $election := $values.leaderElection -}}
{{- $pullSecrets := list -}}
{{- range .Values.global.imagePullSecrets }}{{ $pullSecrets = append $pullSecrets .name }}{{ end -}}
{{- $own := dict
  "namespace" .Release.Namespace
  "watch_namespaces" (include "pagemill.watchNamespaces" . | fromJsonArray)
  "engine_image" (include "pagemill.image" (dict "root" . "component" "engine"))
  "cpu_engine_image" (include "pagemill.image" (dict "root" . "component" "engineCpu"))
  "image_pull_policy" .Values.image.engine.pullPolicy
  "image_pull_secrets" $pullSecrets
  "gateway_url" (include "pagemill.gatewayUrl" .)
  "gateway_selector" (include "pagemill.selector" (dict "root" . "component" "gateway") | fromYaml)
  "operator_selector" (include "pagemill.selector" (dict "root" . "component" "operator") | fromYaml)
  "prometheus_namespace_selector" .Values.prometheus.namespaceLabels
  "prometheus_pod_selector" (include "pagemill.prometheusPods" . | fromJson)
  "keys_secret" (include "pagemill.keysName" .)
  "lease_name" (include "pagemill.operatorName" .)
  "lease_duration_s" $election.leaseDurationSeconds
  "renew_deadline_s" $election.renewDeadlineSeconds
  "retry_period_s" $election.retryPeriodSeconds
  "resync_s" $values.resyncSeconds
  "key_rotation_s" $values.keyRotationSeconds
  "host" "::"
  "metrics_port" 8080
  "gateway_control_port" 8081
  "log_level" (upper $values.logLevel)
-}}
{{- with .Values.engineTls.secret }}{{ $_ := set $own "engine_tls" (merge (dict "secret" .) (include "pagemill.engineTrust" $ | fromJson)) }}{{ end -}}
{{- mustMergeOverwrite $own (deepCopy $values.settings) | toPrettyJson -}}
{{- end -}}

{{/* How gateways and operator check the certificates of engines. */}}
{{- define "pagemill.engineTrust" -}}
{{- dict "ca_file" "/etc/pagemill-engine-ca/ca.crt" "server_name" .Values.engineTls.serverName | toJson -}}
{{- end -}}

{{- define "pagemill.gatewaySettings" -}}
{{- $values := .Values.gateway -}}
{{- $kubernetes := dict
  "namespaces" (include "pagemill.watchNamespaces" . | fromJsonArray)
  "keys_secret" (dict "namespace" .Release.Namespace "name" (include "pagemill.keysName" .))
  "last_known_file" "/var/lib/pagemill/catalog.json"
-}}
{{- $own := dict
  "host" "::"
  "port" 8080
  "workers" $values.workers
  "max_connections" $values.maxConnections
  "trusted_proxies" $values.trustedProxies
  "control_host" "::"
  "control_port" 8081
  "discovery" "kubernetes"
  "kubernetes" $kubernetes
  "allow_anonymous" $values.auth.allowAnonymous
  "drain_delay_s" $values.drainDelaySeconds
  "drain_timeout_s" $values.drainTimeoutSeconds
-}}
{{- if $values.tls.secret }}{{ $_ := set $own "tls" (dict "cert_file" "/etc/pagemill-tls/tls.crt" "key_file" "/etc/pagemill-tls/tls.key") }}{{ end -}}
{{- if .Values.engineTls.secret }}{{ $_ := set $own "engine_tls" (include "pagemill.engineTrust" . | fromJson) }}{{ end -}}
{{- if include "pagemill.hasApiKeys" . }}{{ $_ := set $own "api_keys_file" "/etc/pagemill-keys/keys" }}{{ end -}}
{{- with include "pagemill.redisSettings" . | fromJson }}{{ $_ := set $own "redis" . }}{{ end -}}
{{- with .Values.tracing -}}
{{- if .endpoint -}}
{{- $tracing := dict "endpoint" .endpoint "sample_ratio" .sampleRatio -}}
{{- if .headersSecret }}{{ $_ := set $tracing "headers_file" "/etc/pagemill-tracing/headers" }}{{ end -}}
{{- $_ := set $own "tracing" $tracing -}}
{{- end -}}
{{- end -}}
{{- mustMergeOverwrite $own (deepCopy $values.settings) | toPrettyJson -}}
{{- end -}}

{{/* The connection to Redis as a map; empty if there is none. */}}
{{- define "pagemill.redisSettings" -}}
{{- $redis := .Values.redis -}}
{{- $scaling := .Values.gateway.autoscaling -}}
{{- $gateways := ternary $scaling.minReplicas .Values.gateway.replicas $scaling.enabled -}}
{{- $own := dict "keys" $redis.keys "expected_gateways" (max 1 (int $gateways)) -}}
{{- if $redis.bundled.enabled -}}
{{- $host := printf "%s.%s.svc.%s" (include "pagemill.redisName" .) .Release.Namespace .Values.clusterDomain -}}
{{- merge $own (dict "url" (printf "redis://%s:6379/0" $host) "password_file" "/etc/pagemill-redis/password") | toJson -}}
{{- else if $redis.existingSecret -}}
{{- merge $own (dict "url_file" "/etc/pagemill-redis/url") | toJson -}}
{{- else -}}
{}
{{- end -}}
{{- end -}}

{{- define "pagemill.hasRedis" -}}
{{- if or .Values.redis.bundled.enabled .Values.redis.existingSecret }}true{{ end -}}
{{- end -}}

{{- define "pagemill.hasApiKeys" -}}
{{- if or .Values.gateway.apiKeys.existingSecret .Values.gateway.apiKeys.sha256 }}true{{ end -}}
{{- end -}}

{{/* Termination grace period of a gateway pod: the drain of its settings, and 20 s to exit. */}}
{{- define "pagemill.gatewayGraceSeconds" -}}
{{- $settings := include "pagemill.gatewaySettings" . | fromJson -}}
{{- add (addf $settings.drain_delay_s $settings.drain_timeout_s | ceil | int) 20 -}}
{{- end -}}
