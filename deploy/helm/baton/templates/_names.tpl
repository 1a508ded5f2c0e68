{{- /* The name of everything: the release's. */ -}}
{{- define "baton.name" -}}
{{ .Release.Name }}
{{- end }}

{{- define "baton.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* Where processes find each other. */ -}}
{{- define "baton.registry" -}}
{{- if .Values.etcd.enabled -}}
etcd://{{ include "baton.name" . }}-etcd:2379/{{ include "baton.name" . }}
{{- else -}}
{{ required "etcd.url is needed when etcd.enabled is false" .Values.etcd.url }}
{{- end -}}
{{- end }}

{{- /* What selects the pods of one component: (list . "router"). */ -}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ include "baton.name" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/part-of: baton
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end }}

{{- /* Apart, where that is possible: (list . "router"). */ -}}
{{- define "baton.apart" -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {{- include "baton.selector" . | nindent 12 }}
{{- end }}

{{- define "baton.spread" -}}
- maxSkew: 1
  topologyKey: topology.kubernetes.io/zone
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- include "baton.selector" . | nindent 6 }}
{{- end }}

{{- /* A budget for one component: (list . "router"). */ -}}
{{- define "baton.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "baton.name" (index . 0) }}-{{ index . 1 }}
  labels: {{- include "baton.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{- include "baton.selector" . | nindent 6 }}
{{- end }}

{{- define "baton.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}
