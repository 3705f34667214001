{{/* What the operator and the gateway may do where LLMDeployments are. */}}

{{- define "pagemill.operatorRules" -}}
- apiGroups: [pagemill.dev]
  resources: [llmdeployments]
  verbs: [list, watch]
- apiGroups: [pagemill.dev]
  resources: [llmdeployments/status]
  verbs: [patch]
# Children of LLMDeployments. Token Secrets are among them, whose names RBAC cannot foresee: see the admission policy.
- apiGroups: [""]
  resources: [configmaps, persistentvolumeclaims, secrets, services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, create, patch, delete]
# Patched is what a pod costs to remove, before replicas are: see the admission policy.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch]
# How far a loader is stands in its log.
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end -}}

{{/* The operator watches all its kinds in the same namespaces, and its own is always among them. */}}
{{- define "pagemill.operatorReadRules" -}}
- apiGroups: ["", apps, batch, networking.k8s.io, pagemill.dev, policy]
  resources:
    - configmaps
    - deployments
    - jobs
    - llmdeployments
    - networkpolicies
    - persistentvolumeclaims
    - poddisruptionbudgets
    - pods
    - secrets
    - services
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
