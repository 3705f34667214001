{{/* Labels of every object. Values cannot override the labels by which objects are selected. */}}
{{- define "pagemill.labels" -}}
{{- $own := dict
  "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-")
  "app.kubernetes.io/name" (include "pagemill.name" .)
  "app.kubernetes.io/instance" .Release.Name
  "app.kubernetes.io/managed-by" .Release.Service
-}}
{{- $more := dict "app.kubernetes.io/version" .Chart.AppVersion "app.kubernetes.io/part-of" "pagemill" -}}
{{- merge $own .Values.commonLabels $more | toYaml -}}
{{- end -}}

{{/* Labels that never change in the life of a release. Call with (dict "root" $ "component" "gateway"). */}}
{{- define "pagemill.selector" -}}
app.kubernetes.io/name: {{ include "pagemill.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Name, namespace, labels and annotations. Call with (dict "root" $ "name" NAME), optionally "component",
"namespace", "labels", "annotations", and "cluster" true for objects without a namespace. */}}
{{- define "pagemill.metadata" -}}
name: {{ .name }}
{{- if not .cluster }}
namespace: {{ default .root.Release.Namespace .namespace }}
{{- end }}
labels:
  {{- $own := include "pagemill.labels" .root | fromYaml }}
  {{- with .component }}{{ $_ := set $own "app.kubernetes.io/component" . }}{{ end }}
  {{- merge $own (default (dict) .labels) | toYaml | nindent 2 }}
{{- with merge (dict) (default (dict) .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "pagemill.crdAnnotations" -}}
{{- $own := ternary (dict "helm.sh/resource-policy" "keep") (dict) .Values.crds.keep -}}
{{- with merge $own .Values.crds.annotations .Values.commonAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- end -}}

{{/* Labels of the pods that may scrape metrics, as a map. */}}
{{- define "pagemill.prometheusPods" -}}
{{- $unrestricted := not (or .Values.prometheus.podLabels .Values.prometheus.namespaceLabels) -}}
{{- toJson (ternary (dict "app.kubernetes.io/name" "prometheus") .Values.prometheus.podLabels $unrestricted) -}}
{{- end -}}

{{/* The pods that may scrape metrics, as an entry of a NetworkPolicy's `from`. */}}
{{- define "pagemill.prometheusPeer" -}}
{{- $namespaces := .Values.prometheus.namespaceLabels -}}
- namespaceSelector: {{ ternary (dict "matchLabels" $namespaces) (dict) (not (empty $namespaces)) | toJson }}
  {{- with include "pagemill.prometheusPods" . | fromJson }}
  podSelector:
    matchLabels:
      {{- toYaml . | nindent 6 }}
  {{- end }}
{{- end -}}
