{{- /* The name of all objects: the release's. Names of Services begin with a letter, and the name of a StatefulSet
with its hash, `NAME-prefill-head-10-HASH`, is a label: at most 63 characters. YAML reads `true` as no text. */ -}}
{{- define "baton.name" -}}
{{- $name := .Release.Name }}
{{- if not (and (regexMatch "^[a-z]([-a-z0-9]{0,34}[a-z0-9])?$" $name) (kindIs "string" (printf "name: %s" $name | fromYaml).name)) }}
{{- fail (printf "the release's name %q is not possible: it begins with a letter and has at most 36 letters, digits and hyphens" $name) }}
{{- end }}
{{- $name }}
{{- end }}

{{- define "baton.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* The registry's URL, for the containers of every process. */ -}}
{{- define "baton.registry" -}}
- name: BATON_REGISTRY__URL
  {{- if .Values.etcd.enabled }}
  value: etcd://{{ include "baton.name" . }}-etcd:2379/{{ include "baton.name" . }}
  {{- else }}
  valueFrom:
    secretKeyRef:
      name: {{ required "etcd.external.urlSecret.name is needed when etcd.enabled is false" .Values.etcd.external.urlSecret.name }}
      key: {{ .Values.etcd.external.urlSecret.key }}
  {{- end }}
{{- end }}

{{- /* The Secret of the cluster: its secret and the admin key. */ -}}
{{- define "baton.identity" -}}
{{ .Values.identity.existingSecret | default (printf "%s-identity" (include "baton.name" .)) }}
{{- end }}

{{- define "baton.identityFiles" -}}
- name: BATON_CLUSTER__SECRET_FILE
  value: /etc/baton-identity/cluster
- name: BATON_CLUSTER__ADMIN_KEY_FILE
  value: /etc/baton-identity/admin
{{- if .Values.tls.enabled }}
- name: BATON_TLS__CA
  value: /etc/baton-tls/ca.crt
- name: BATON_TLS__CERT
  value: /etc/baton-tls/tls.crt
- name: BATON_TLS__KEY
  value: /etc/baton-tls/tls.key
{{- end }}
{{- end }}

{{- /* The certificate of one role: the mount, and the volume: (list . "router"). */ -}}
{{- define "baton.tlsMount" -}}
{{- if (index . 0).Values.tls.enabled }}
- name: tls-{{ index . 1 }}
  mountPath: /etc/baton-tls
  readOnly: true
{{- end }}
{{- end }}

{{- define "baton.tlsVolume" -}}
{{- if (index . 0).Values.tls.enabled }}
- name: tls-{{ index . 1 }}
  secret:
    secretName: {{ include "baton.name" (index . 0) }}-{{ index . 1 }}-tls
{{- end }}
{{- end }}

{{- define "baton.identityMount" -}}
- name: identity
  mountPath: /etc/baton-identity
  readOnly: true
{{- end }}

{{- define "baton.identityVolume" -}}
- name: identity
  secret:
    secretName: {{ include "baton.identity" . }}
{{- end }}

{{- /* Certificates of an external etcd: the mount, and the volume. */ -}}
{{- define "baton.etcdMount" -}}
{{- if and (not .Values.etcd.enabled) .Values.etcd.external.certificatesSecret }}
- name: etcd-certificates
  mountPath: /etc/baton-etcd
  readOnly: true
{{- end }}
{{- end }}

{{- define "baton.etcdVolume" -}}
{{- if and (not .Values.etcd.enabled) .Values.etcd.external.certificatesSecret }}
- name: etcd-certificates
  secret:
    secretName: {{ .Values.etcd.external.certificatesSecret }}
{{- end }}
{{- end }}

{{- /* The model, for the containers of routers and of nodes that compute. */ -}}
{{- define "baton.model" -}}
- name: BATON_MODEL__PATH
  valueFrom:
    configMapKeyRef:
      name: {{ include "baton.name" . }}-model
      key: path
{{- end }}

{{- /* The volume of models: a claim, or a folder of the pod that the init container fills. */ -}}
{{- define "baton.modelVolume" -}}
- name: models
  {{- if .Values.model.claim }}
  persistentVolumeClaim:
    claimName: {{ .Values.model.claim }}
    readOnly: true
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}

{{- /* The init container that fills the folder of models, with a workload's environment and mounts: (list . WORKLOAD). */ -}}
{{- define "baton.modelFetch" -}}
{{- $of := . }}
{{- with (index . 0).Values.model.fetch }}
{{- if .url }}
initContainers:
  - name: fetch-model
    image: {{ .image }}
    command: [sh, -ec]
    args:
      - |
        test ! -e /models/.complete || exit 0
        curl --fail --location --retry 5 --continue-at - --output /models/.archive "$MODEL_URL"
        tar -x -f /models/.archive -C /models
        rm /models/.archive
        touch /models/.complete
    env:
      - name: MODEL_URL
        value: {{ quote .url }}
      {{- include "baton.list" (append $of "env") | nindent 6 }}
    resources:
      requests: { cpu: 100m, memory: 64Mi }
      limits: { memory: 256Mi }
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: { drop: [ALL] }
    volumeMounts:
      {{- include "baton.list" (append $of "volumeMounts") | nindent 6 }}
      - name: models
        mountPath: /models
{{- end }}
{{- end }}
{{- end }}

{{- /* The port of a URL. */ -}}
{{- define "baton.port" -}}
{{- $url := urlParse . -}}
{{ regexFind "[0-9]+$" $url.host | default (ternary "443" "80" (eq $url.scheme "https")) }}
{{- end }}

{{- /* A checksum of a pod's configuration: (list . "the TOML text"). */ -}}
{{- define "baton.checksum" -}}
{{- $top := index . 0 -}}
{{ tpl (print (index . 1) $top.Values.model.path) $top | sha256sum }}
{{- end }}

{{- /* Seconds from SIGTERM to SIGKILL: the drain, and time to withdraw and close. */ -}}
{{- define "baton.nodeGrace" -}}
{{ add (int .Values.nodes.drainSeconds) 15 }}
{{- end }}

{{- /* The labels that select the pods of one component: (list . "router"). */ -}}
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

{{- /* Pods of one component on different machines, if possible; for boxes always: (list . "router"). */ -}}
{{- define "baton.apart" -}}
podAntiAffinity:
  {{- if eq (index . 1) "box" }}
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      labelSelector:
        matchLabels: {{- include "baton.selector" . | nindent 10 }}
  {{- else }}
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {{- include "baton.selector" . | nindent 12 }}
  {{- end }}
{{- end }}

{{- define "baton.spread" -}}
- maxSkew: 1
  topologyKey: topology.kubernetes.io/zone
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- include "baton.selector" . | nindent 6 }}
{{- end }}

{{- /* A PodDisruptionBudget for one component: (list . "router"). */ -}}
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

{{- /* The entries of a map for all workloads and for this one, which override: (list . WORKLOAD "labels"). */ -}}
{{- define "baton.map" -}}
{{- $all := index (index . 0).Values.pods (index . 2) | default dict -}}
{{- $own := index (index . 1) (index . 2) | default dict -}}
{{- range list "name" "component" }}
{{- if and (eq (index $ 2) "labels") (hasKey (merge (deepCopy $own) $all) (printf "app.kubernetes.io/%s" .)) }}
{{- fail (printf "app.kubernetes.io/%s is a label by which the chart selects pods: leave it out" .) }}
{{- end }}
{{- end -}}
{{- with merge (deepCopy $own) $all }}{{ toYaml . }}{{ end -}}
{{- end }}

{{- /* The entries of a list for all workloads and for this one: (list . WORKLOAD "env"). */ -}}
{{- define "baton.list" -}}
{{- $all := index (index . 0).Values.pods (index . 2) | default list -}}
{{- $own := index (index . 1) (index . 2) | default list -}}
{{- with concat $all $own }}{{ toYaml . }}{{ end -}}
{{- end }}

{{- /* Node selector, tolerations, affinity and priority class of a workload: (list . WORKLOAD "router"). */ -}}
{{- define "baton.scheduling" -}}
{{- $top := index . 0 -}}
{{- $own := index . 1 -}}
{{- $affinity := include "baton.map" (list $top $own "affinity") -}}
affinity: {{- $affinity | default (include "baton.apart" (list $top (index . 2))) | nindent 2 }}
{{- include "baton.selectors" (list $top $own) }}
{{- end }}

{{- /* The same for a pod that may run anywhere: (list . WORKLOAD). */ -}}
{{- define "baton.placement" -}}
{{- with include "baton.map" (list (index . 0) (index . 1) "affinity") }}
affinity: {{- . | nindent 2 }}
{{- end }}
{{- include "baton.selectors" . }}
{{- end }}

{{- define "baton.selectors" -}}
{{- $top := index . 0 -}}
{{- $own := index . 1 -}}
{{- with include "baton.map" (list $top $own "nodeSelector") }}
nodeSelector: {{- . | nindent 2 }}
{{- end }}
{{- with include "baton.list" (list $top $own "tolerations") }}
tolerations: {{- . | nindent 2 }}
{{- end }}
{{- with $own.priorityClassName | default $top.Values.pods.priorityClassName }}
priorityClassName: {{ quote . }}
{{- end }}
{{- end }}
