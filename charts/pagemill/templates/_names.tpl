{{/*
Names of the chart's objects. Names of cluster-scoped objects contain the namespace, so that releases of one name in two
namespaces do not collide. A namespace's name has no dot, so the first dot ends it: `a` with `b-c` differs from `a-b` with `c`.
*/}}

{{- define "pagemill.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "pagemill.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "pagemill.clusterName" -}}
{{- printf "%s.%s" .Release.Namespace (include "pagemill.fullname" .) -}}
{{- end -}}

{{- define "pagemill.operatorName" -}}
{{- include "pagemill.fullname" . }}-operator
{{- end -}}

{{- define "pagemill.gatewayName" -}}
{{- include "pagemill.fullname" . }}-gateway
{{- end -}}

{{- define "pagemill.keysName" -}}
{{- include "pagemill.fullname" . }}-keys
{{- end -}}

{{- define "pagemill.apiKeysName" -}}
{{- default (printf "%s-api-keys" (include "pagemill.fullname" .)) .Values.gateway.apiKeys.existingSecret -}}
{{- end -}}

{{- define "pagemill.redisName" -}}
{{- include "pagemill.fullname" . }}-redis
{{- end -}}

{{/* Call with (dict "root" $ "component" "operator"). */}}
{{- define "pagemill.serviceAccountName" -}}
{{- $account := (index .root.Values .component).serviceAccount -}}
{{- $made := printf "%s-%s" (include "pagemill.fullname" .root) .component -}}
{{- $account.name | default (ternary $made "default" $account.create) -}}
{{- end -}}

{{/* registry/repository:tag@digest. Call with (dict "root" $ "component" "engine"). */}}
{{- define "pagemill.image" -}}
{{- $image := index .root.Values.image .component -}}
{{- $registry := default $image.registry .root.Values.global.imageRegistry -}}
{{- $name := ternary (printf "%s/%s" $registry $image.repository) $image.repository (ne $registry "") -}}
{{- $tagged := printf "%s:%s" $name (default .root.Chart.AppVersion $image.tag) -}}
{{- ternary (printf "%s@%s" $tagged $image.digest) $tagged (ne $image.digest "") -}}
{{- end -}}

{{/* Namespaces to serve, as a JSON list; empty: all. */}}
{{- define "pagemill.watchNamespaces" -}}
{{- $names := list -}}
{{- range .Values.watchNamespaces -}}
{{- $names = append $names (tpl . $) -}}
{{- end -}}
{{- $names | uniq | sortAlpha | toJson -}}
{{- end -}}

{{/* Whether cluster-scoped objects may be created: the release installs the definition or cluster roles. */}}
{{- define "pagemill.ownsCluster" -}}
{{- if or .Values.crds.install (not .Values.watchNamespaces) }}true{{ end -}}
{{- end -}}

{{- define "pagemill.gatewayScheme" -}}
{{- ternary "https" "http" (ne .Values.gateway.tls.secret "") -}}
{{- end -}}

{{- define "pagemill.gatewayUrl" -}}
{{- $scheme := include "pagemill.gatewayScheme" . -}}
{{- $usual := ternary 443 80 (eq $scheme "https") -}}
{{- $port := int .Values.gateway.service.port -}}
{{- $host := printf "%s.%s.svc.%s" (include "pagemill.gatewayName" .) .Release.Namespace .Values.clusterDomain -}}
{{- default (printf "%s://%s%s" $scheme $host (ternary "" (printf ":%d" $port) (eq $port $usual))) .Values.gateway.url -}}
{{- end -}}
