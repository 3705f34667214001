{{/* RBAC rules of the operator and the gateway in the namespaces of LLMDeployments. */}}

{{- define "pagemill.operatorRules" -}}
- apiGroups: [pagemill.dev]
  resources: [llmdeployments, loraadapters]
  verbs: [list, watch]
- apiGroups: [pagemill.dev]
  resources: [llmdeployments/status, loraadapters/status]
  verbs: [patch]
# Children of LLMDeployments. RBAC cannot limit token Secrets by name; the admission policy does.
- apiGroups: [""]
  resources: [configmaps, persistentvolumeclaims, secrets, services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
# An autoscaler beside the operator's own is named in conditions.
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [list, watch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, create, patch, delete]
# Replicas of several pods.
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, create, patch, delete]
# Only annotations of pods are patched, for example the deletion cost; the admission policy enforces that.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch]
# The progress of a loader is in its log.
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end -}}

{{/* The operator watches all its kinds in the same namespaces, which always include its own. */}}
{{- define "pagemill.operatorReadRules" -}}
- apiGroups: [""]
  resources: [configmaps, persistentvolumeclaims, pods, secrets, services]
  verbs: [list, watch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [list, watch]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [list, watch]
# An autoscaler beside the operator's own is named in conditions.
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [list, watch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [list, watch]
- apiGroups: [pagemill.dev]
  resources: [llmdeployments, loraadapters]
  verbs: [list, watch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [list, watch]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [list]
{{- end -}}

{{- define "pagemill.gatewayRules" -}}
- apiGroups: [pagemill.dev]
  resources: [llmdeployments]
  verbs: [list, watch]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
{{- end -}}
