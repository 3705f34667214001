{{/* Engine pods in the watched namespaces, as a NetworkPolicy peer. */}}
{{- define "pagemill.enginePeer" -}}
{{- $namespaces := include "pagemill.watchNamespaces" . | fromJsonArray -}}
- podSelector:
    matchLabels:
      app.kubernetes.io/name: pagemill-engine
  {{- if $namespaces }}
  namespaceSelector:
    matchExpressions:
      - key: kubernetes.io/metadata.name
        operator: In
        values: {{ toJson $namespaces }}
  {{- else }}
  namespaceSelector: {}
  {{- end }}
{{- end -}}

{{/* Egress that operator and gateway share: the cluster's DNS and the API server. */}}
{{- define "pagemill.clusterEgress" -}}
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
    # Policies see the port of the DNS pods, which is not 53 on every platform.
    - port: 5353
      protocol: UDP
    - port: 5353
      protocol: TCP
- to:
    {{- range .Values.network.apiServerCIDRs }}
    - ipBlock:
        cidr: {{ . | quote }}
    {{- end }}
  ports:
    {{- range .Values.network.apiServerPorts }}
    - port: {{ . }}
      protocol: TCP
    {{- end }}
{{- end -}}
