{{/* Parts that the pods of operator and gateway share. Call each with (dict "root" $ "component" "operator"). */}}

{{- define "pagemill.podMetadata" -}}
{{- $values := index .root.Values .component -}}
{{- $own := include "pagemill.selector" . | fromYaml -}}
{{- $partOf := dict "app.kubernetes.io/part-of" "pagemill" -}}
labels:
  {{- merge $own $values.podLabels .root.Values.commonLabels $partOf | toYaml | nindent 2 }}
annotations:
  kubectl.kubernetes.io/default-container: {{ .component }}
  pagemill.dev/settings: {{ include (printf "pagemill.%sSettings" .component) .root | sha256sum }}
  {{- with merge (dict) $values.podAnnotations .root.Values.commonAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "pagemill.scheduling" -}}
{{- $values := index .root.Values .component -}}
topologySpreadConstraints:
  {{- if $values.topologySpreadConstraints }}
  {{- toYaml $values.topologySpreadConstraints | nindent 2 }}
  {{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "pagemill.selector" . | nindent 8 }}
    matchLabelKeys: [pod-template-hash]
  {{- end }}
{{- with .root.Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The authority of the engines' certificates, for pods that connect to engines. */}}
{{- define "pagemill.engineCaMount" -}}
- name: engine-ca
  mountPath: /etc/pagemill-engine-ca
  readOnly: true
{{- end -}}

{{- define "pagemill.engineCaVolume" -}}
- name: engine-ca
  secret:
    secretName: {{ .Values.engineTls.secret }}
    defaultMode: 0440
    items:
      - key: ca.crt
        path: ca.crt
{{- end -}}
