{{- define "quintlet.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "quintlet.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Labels that select the pods of one part. Takes root and part. */}}
{{- define "quintlet.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "quintlet.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "quintlet.name" .) }}
{{- end }}

{{/* Takes root and the name of the image in values. */}}
{{- define "quintlet.image" -}}
{{- $image := index .root.Values.images .image -}}
image: "{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}"
imagePullPolicy: {{ $image.pullPolicy | default "IfNotPresent" }}
{{- end }}

{{- define "quintlet.runtimeSocket" -}}
{{- if .Values.containerd.enabled }}{{ .Values.host.runDir }}/runtime/containerd.sock{{ else }}{{ .Values.containerd.socket }}{{ end }}
{{- end }}

{{/* Which parts see the node identity. */}}
{{- define "quintlet.hasKubeconfig" -}}
{{- if or .Values.kubeconfig.hostPath .Values.kubeconfig.secretName }}true{{ end }}
{{- end }}

{{/* The name of the kubeconfig in its directory or secret. */}}
{{- define "quintlet.kubeconfigName" -}}
{{- if .Values.kubeconfig.secretName }}kubeconfig{{ else }}{{ base .Values.kubeconfig.hostPath }}{{ end }}
{{- end }}

{{/* The node API asks the API server who its clients are: without a node identity there is none. */}}
{{- define "quintlet.hasNodeApi" -}}
{{- if and .Values.nodeApi.enabled (include "quintlet.hasKubeconfig" .) }}true{{ end }}
{{- end }}

{{/*
The directories of each part below runDir, as `name: owner group mode`: owner and group are root or a name in `users`. Nothing
for a directory that is another part's. A socket directory is mounted only into its server and its clients. The table of users and
sockets is in ARCHITECTURE.md.
*/}}
{{- define "quintlet.dirs" -}}
cri-proxy:
  cri/admin: root root 0700
  cri/sync: root root 0700
  cri/read: root pleg 2750
  cri/node-api: root nodeApi 2750
  cri/probe: root probe 2750
  keys: root root 0700
pleg-service:
  cri/read: ""
  pleg: pleg watch 2750
probe-service:
  cri/probe: ""
  probe: probe nodeApi 2750
status-reporter:
  pleg: ""
  podsync: ""
  status: reporter nodeApi 2750
node-api:
  cri/node-api: ""
  podsync: ""
  pleg: ""
  probe: ""
  status: ""
  node-api: nodeApi nodeApi 0700
pod-sync:
  cri/sync: ""
  pleg: ""
  probe: ""
  status: ""
  podsync: root watch 2750
  keys: root root 0700
  state: root root 0700
{{- end }}

{{/* The id of a part's user, or of root. Takes root and part. */}}
{{- define "quintlet.user" -}}
{{- $names := dict "pleg-service" "pleg" "probe-service" "probe" "status-reporter" "reporter" "node-api" "nodeApi" -}}
{{- int (get .root.Values.users (get $names .part | default "root")) -}}
{{- end }}

{{/* Arguments of one service. Takes root and part. */}}
{{- define "quintlet.args" -}}
{{- $values := .root.Values -}}
{{- if $values.config }}
- --config=/etc/quintlet/config/config.yaml
{{- end }}
- --run-dir={{ $values.host.runDir }}
- --log-format={{ $values.log.format }}
- --log-level={{ $values.log.level }}
{{- with $values.otlpEndpoint }}
- --otlp-endpoint={{ . }}
{{- end }}
{{- if $values.metrics.enabled }}
- --metrics-listen=127.0.0.1:{{ index $values.metrics.ports .part }}
{{- end }}
{{- if eq .part "cri-proxy" }}
- --runtime-endpoint=unix://{{ include "quintlet.runtimeSocket" .root }}
- --pod-logs-dir={{ $values.host.podLogsDir }}
- --allow-uid=read={{ int $values.users.pleg }}
- --allow-uid=probe={{ int $values.users.probe }}
{{- if include "quintlet.hasNodeApi" .root }}
- --allow-uid=node-api={{ int $values.users.nodeApi }}
{{- end }}
{{- end }}
{{- if and (eq .part "pod-sync") (include "quintlet.hasNodeApi" .root) }}
- --allow-uid={{ int $values.users.nodeApi }}
{{- end }}
{{- if has .part (list "pleg-service" "pod-sync") }}
- --observer-uid={{ int $values.users.reporter }}
{{- end }}
{{- if and (has .part (list "pleg-service" "probe-service" "status-reporter")) (include "quintlet.hasNodeApi" .root) }}
- --observer-uid={{ int $values.users.nodeApi }}
{{- end }}
{{- if has .part (list "status-reporter" "pod-sync" "node-api") }}
- --node-name=$(NODE_NAME){{ $values.node.nameSuffix }}
{{- if include "quintlet.hasKubeconfig" .root }}
- --kubeconfig=/etc/quintlet/credentials/{{ include "quintlet.kubeconfigName" .root }}
{{- end }}
{{- end }}
{{- if eq .part "node-api" }}
- --node-api-port={{ int $values.nodeApi.port }}
- --healthz-port={{ int $values.nodeApi.healthzPort }}
- --cert-dir={{ $values.nodeApi.certDir }}
- --root-dir={{ $values.host.rootDir }}
- --cgroup-root={{ $values.host.cgroupRoot }}
- --pod-logs-dir={{ $values.host.podLogsDir }}
# Logs of the host are available from its kubelet.
- --enable-system-log-handler=false
{{- if $values.nodeApi.clientCAFile }}
- --client-ca-file=/etc/quintlet/client-ca/{{ base $values.nodeApi.clientCAFile }}
{{- end }}
{{- end }}
{{- if has .part (list "status-reporter" "pod-sync") }}
{{- if $values.node.nameSuffix }}
# Affinity that excludes the Nodes which these DaemonSets create.
- --node-label=quintlet.dev/beside-kubelet=true
{{- end }}
{{- range $key, $value := $values.node.labels }}
- --node-label={{ $key }}={{ $value }}
{{- end }}
{{- end }}
{{- if eq .part "pod-sync" }}
- --node-api-port={{ if include "quintlet.hasNodeApi" .root }}{{ int $values.nodeApi.port }}{{ else }}0{{ end }}
- --root-dir={{ $values.host.rootDir }}
- --pod-logs-dir={{ $values.host.podLogsDir }}
- --container-logs-dir={{ $values.host.containerLogsDir }}
- --cgroup-root={{ $values.host.cgroupRoot }}
- --cluster-domain={{ $values.cluster.domain }}
{{- range $values.cluster.dns }}
- --cluster-dns={{ . }}
{{- end }}
{{- if $values.manifests.hostPath }}
- --manifests=/etc/quintlet/manifests
{{- end }}
{{- end }}
{{- range (index $values.services .part).extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* One service's container. Takes root and part. */}}
{{- define "quintlet.container" -}}
{{- $values := .root.Values -}}
{{- $part := .part -}}
- name: {{ $part }}
  {{- include "quintlet.image" (dict "root" .root "image" "services") | nindent 2 }}
  command: [{{ $part }}]
  args:
    {{- include "quintlet.args" . | nindent 4 }}
  {{- if eq $part "node-api" }}
  ports:
    - { name: https, containerPort: {{ int $values.nodeApi.port }} }
  {{- end }}
  {{- if has $part (list "status-reporter" "pod-sync" "node-api") }}
  env:
    - name: NODE_NAME
      valueFrom: { fieldRef: { fieldPath: spec.nodeName } }
  {{- end }}
  securityContext:
    {{- if eq $part "pod-sync" }}
    # Mounts volumes for pods, which must reach the runtime: Kubernetes allows that to privileged containers only.
    privileged: true
    runAsUser: 0
    {{- else if eq $part "cri-proxy" }}
    runAsUser: 0
    allowPrivilegeEscalation: false
    capabilities: { drop: [ALL], add: [CHOWN, DAC_OVERRIDE, FOWNER] }
    seccompProfile: { type: RuntimeDefault }
    {{- else }}
    runAsNonRoot: true
    runAsUser: {{ include "quintlet.user" . }}
    runAsGroup: {{ include "quintlet.user" . }}
    allowPrivilegeEscalation: false
    capabilities: { drop: [ALL] }
    seccompProfile: { type: RuntimeDefault }
    {{- end }}
    readOnlyRootFilesystem: true
  # A restart helps if a socket does not respond or the sync loop is stalled, and not if the runtime is unavailable.
  livenessProbe:
    exec: { command: [quintctl, --run-dir={{ $values.host.runDir }}, health, --live, {{ $part }}] }
    {{- toYaml $values.probes.liveness | nindent 4 }}
  readinessProbe:
    exec: { command: [quintctl, --run-dir={{ $values.host.runDir }}, health, {{ $part }}] }
    {{- toYaml $values.probes.readiness | nindent 4 }}
  resources:
    {{- toYaml (index $values.services $part).resources | nindent 4 }}
  volumeMounts:
    {{- range $dir, $owner := index (include "quintlet.dirs" .root | fromYaml) $part }}
    - { name: run-{{ $dir | replace "/" "-" }}, mountPath: {{ $values.host.runDir }}/{{ $dir }} }
    {{- end }}
    {{- if $values.config }}
    - { name: config, mountPath: /etc/quintlet/config, readOnly: true }
    {{- end }}
    {{- if eq $part "cri-proxy" }}
    - { name: runtime, mountPath: {{ dir (include "quintlet.runtimeSocket" .root) }} }
    # For `kubectl logs`.
    - { name: pod-logs, mountPath: {{ $values.host.podLogsDir }}, readOnly: true }
    {{- end }}
    {{- if eq $part "node-api" }}
    # For statistics of their file systems.
    - { name: root, mountPath: {{ $values.host.rootDir }}, readOnly: true }
    - { name: pod-logs, mountPath: {{ $values.host.podLogsDir }}, readOnly: true }
    - { name: node-api-certs, mountPath: {{ $values.nodeApi.certDir }} }
    {{- if $values.nodeApi.clientCAFile }}
    # A directory: a mount of the file alone would show the old file after it is replaced.
    - { name: client-ca, mountPath: /etc/quintlet/client-ca, readOnly: true }
    {{- end }}
    # For the memory of the node and what the runtime omits of pods.
    - { name: cgroup, mountPath: /sys/fs/cgroup, readOnly: true }
    {{- end }}
    {{- if and (has $part (list "status-reporter" "pod-sync" "node-api")) (include "quintlet.hasKubeconfig" .root) }}
    # The whole directory or secret: a mount of the file alone would show the old file after it is replaced.
    - { name: kubeconfig, mountPath: /etc/quintlet/credentials, readOnly: true }
    {{- end }}
    {{- if eq $part "pod-sync" }}
    - { name: root, mountPath: {{ $values.host.rootDir }}, mountPropagation: Bidirectional }
    - { name: pod-logs, mountPath: {{ $values.host.podLogsDir }} }
    {{- if $values.host.containerLogsDir }}
    - { name: container-logs, mountPath: {{ $values.host.containerLogsDir }} }
    {{- end }}
    - { name: cgroup, mountPath: /sys/fs/cgroup }
    - { name: machine-id, mountPath: /etc/machine-id, readOnly: true }
    {{- if $values.shutdown.systemBusDir }}
    - { name: system-bus, mountPath: /run/dbus, readOnly: true }
    {{- end }}
    {{- if $values.shutdown.logindDropIns }}
    - { name: logind-drop-ins, mountPath: /etc/systemd/logind.conf.d }
    {{- end }}
    {{- if $values.manifests.hostPath }}
    - { name: manifests, mountPath: /etc/quintlet/manifests, readOnly: true }
    {{- end }}
    {{- end }}
{{- end }}

{{/* Gives the directories of one service their owners. Takes root and part. */}}
{{- define "quintlet.init" -}}
{{- $users := merge (dict "root" 0) .root.Values.users -}}
{{- $run := .root.Values.host.runDir -}}
- name: {{ .part }}-dirs
  {{- include "quintlet.image" (dict "root" .root "image" "containerd") | nindent 2 }}
  command: [sh, -ec]
  args:
    - |
      {{- range $dir, $owner := index (include "quintlet.dirs" .root | fromYaml) .part }}
      {{- if $owner }}
      {{- $words := splitList " " $owner }}
      chown {{ int (get $users (index $words 0)) }}:{{ int (get $users (index $words 1)) }} {{ $run }}/{{ $dir }}; chmod {{ index $words 2 }} {{ $run }}/{{ $dir }}
      {{- end }}
      {{- end }}
      {{- if eq .part "node-api" }}
      chown {{ int $users.nodeApi }}:{{ int $users.nodeApi }} {{ .root.Values.nodeApi.certDir }}; chmod 0700 {{ .root.Values.nodeApi.certDir }}
      {{- end }}
  securityContext:
    runAsUser: 0
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: { drop: [ALL], add: [CHOWN, FOWNER, FSETID] }
    seccompProfile: { type: RuntimeDefault }
  volumeMounts:
    {{- range $dir, $owner := index (include "quintlet.dirs" .root | fromYaml) .part }}
    {{- if $owner }}
    - { name: run-{{ $dir | replace "/" "-" }}, mountPath: {{ $run }}/{{ $dir }} }
    {{- end }}
    {{- end }}
    {{- if eq .part "node-api" }}
    - { name: node-api-certs, mountPath: {{ .root.Values.nodeApi.certDir }} }
    {{- end }}
{{- end }}

{{/* The containerd container. Takes the root. */}}
{{- define "quintlet.containerd" -}}
- name: containerd
  {{- include "quintlet.image" (dict "root" . "image" "containerd") | nindent 2 }}
  command: [entrypoint.sh]
  env:
    - { name: CGROUP_ROOT, value: {{ .Values.host.cgroupRoot | quote }} }
    - { name: CONTAINERD_ADDRESS, value: {{ include "quintlet.runtimeSocket" . | quote }} }
    - { name: SNAPSHOTTER, value: {{ .Values.containerd.snapshotter | quote }} }
  securityContext:
    # Runs containers.
    privileged: true
    runAsUser: 0
  resources:
    {{- toYaml .Values.containerd.resources | nindent 4 }}
  volumeMounts:
    - { name: containerd-config, mountPath: /etc/containerd }
    - { name: containerd-network, mountPath: {{ .Values.containerd.cni.confDir }} }
    - { name: runtime, mountPath: {{ .Values.host.runDir }}/runtime }
    - { name: containerd-state, mountPath: /run/containerd }
    - { name: containerd-root, mountPath: {{ .Values.containerd.rootDir }} }
    - { name: root, mountPath: {{ .Values.host.rootDir }}, mountPropagation: Bidirectional }
    - { name: pod-logs, mountPath: {{ .Values.host.podLogsDir }} }
    - { name: cgroup, mountPath: /sys/fs/cgroup }
{{- end }}

{{/* The volumes that the given parts mount. Takes root and parts. */}}
{{- define "quintlet.volumes" -}}
{{- $values := .root.Values -}}
{{- $dirs := dict -}}
{{- $all := include "quintlet.dirs" .root | fromYaml -}}
{{- range .parts }}{{ range $dir, $owner := index $all . | default dict }}{{ $_ := set $dirs $dir true }}{{ end }}{{ end -}}
{{- range $dir, $_ := $dirs }}
- name: run-{{ $dir | replace "/" "-" }}
  hostPath: { path: {{ $values.host.runDir }}/{{ $dir }}, type: DirectoryOrCreate }
{{- end }}
{{- if and $values.config (ne (join "" .parts) "containerd") }}
- name: config
  configMap: { name: {{ include "quintlet.name" .root }}-config, items: [{ key: config.yaml, path: config.yaml }] }
{{- end }}
{{- if or (has "cri-proxy" .parts) (has "containerd" .parts) }}
- name: runtime
  hostPath: { path: {{ dir (include "quintlet.runtimeSocket" .root) }}, type: {{ if $values.containerd.enabled }}DirectoryOrCreate{{ else }}Directory{{ end }} }
{{- end }}
{{- if has "containerd" .parts }}
- name: containerd-config
  configMap: { name: {{ include "quintlet.name" .root }}-containerd, items: [{ key: config.toml, path: config.toml }] }
- name: containerd-network
  configMap: { name: {{ include "quintlet.name" .root }}-containerd, items: [{ key: 10-quintlet.conflist, path: 10-quintlet.conflist }] }
- name: containerd-state
  emptyDir: {}
- name: containerd-root
  hostPath: { path: {{ $values.containerd.rootDir }}, type: DirectoryOrCreate }
{{- end }}
{{- if has "node-api" .parts }}
- name: node-api-certs
  hostPath: { path: {{ $values.nodeApi.certDir }}, type: DirectoryOrCreate }
{{- end }}
{{- if and (has "node-api" .parts) $values.nodeApi.clientCAFile }}
- name: client-ca
  hostPath: { path: {{ dir $values.nodeApi.clientCAFile }}, type: Directory }
{{- end }}
{{- if and (or (has "pod-sync" .parts) (has "status-reporter" .parts) (has "node-api" .parts)) (include "quintlet.hasKubeconfig" .root) }}
- name: kubeconfig
  {{- if $values.kubeconfig.secretName }}
  secret: { secretName: {{ $values.kubeconfig.secretName }}, defaultMode: 0440 }
  {{- else }}
  hostPath: { path: {{ dir $values.kubeconfig.hostPath }}, type: Directory }
  {{- end }}
{{- end }}
{{- if or (has "pod-sync" .parts) (has "containerd" .parts) (has "node-api" .parts) }}
- name: root
  hostPath: { path: {{ $values.host.rootDir }}, type: DirectoryOrCreate }
{{- end }}
{{- if or (has "cri-proxy" .parts) (has "pod-sync" .parts) (has "containerd" .parts) (has "node-api" .parts) }}
- name: pod-logs
  hostPath: { path: {{ $values.host.podLogsDir }}, type: DirectoryOrCreate }
{{- end }}
{{- if or (has "pod-sync" .parts) (has "containerd" .parts) (has "node-api" .parts) }}
- name: cgroup
  hostPath: { path: /sys/fs/cgroup, type: Directory }
{{- end }}
{{- if has "pod-sync" .parts }}
{{- if $values.host.containerLogsDir }}
- name: container-logs
  hostPath: { path: {{ $values.host.containerLogsDir }}, type: DirectoryOrCreate }
{{- end }}
- name: machine-id
  hostPath: { path: /etc/machine-id, type: File }
{{- if $values.shutdown.systemBusDir }}
- name: system-bus
  hostPath: { path: {{ $values.shutdown.systemBusDir }}, type: DirectoryOrCreate }
{{- end }}
{{- if $values.shutdown.logindDropIns }}
- name: logind-drop-ins
  hostPath: { path: {{ $values.shutdown.logindDropIns }}, type: DirectoryOrCreate }
{{- end }}
{{- if $values.manifests.hostPath }}
- name: manifests
  hostPath: { path: {{ $values.manifests.hostPath }}, type: Directory }
{{- end }}
{{- end }}
{{- end }}

{{/*
Removes from a host what an uninstalled release has left there, as one command of a shell. Mounts go first; a directory with a
mount left in it stays, since what is mounted may be a hostPath volume.
*/}}
{{- define "quintlet.cleanUp" -}}
{{- $host := .Values.host -}}
for dir in {{ $host.rootDir }} {{ $host.runDir }}{{ if .Values.containerd.enabled }} {{ .Values.containerd.rootDir }}{{ end }}; do below() { awk -v dir="$dir/" 'index($2, dir) == 1 { print $2 }' /proc/mounts; }; below | sort -r | xargs -r umount; [ -n "$(below)" ] || rm -rf "$dir"; done; rm -rf {{ $host.podLogsDir }} {{ .Values.nodeApi.certDir }}; find /sys/fs/cgroup -depth -type d \( -path '/sys/fs/cgroup*{{ $host.cgroupRoot }}' -o -path '/sys/fs/cgroup*{{ $host.cgroupRoot }}/*' \) -exec rmdir {} +{{ if .Values.containerd.enabled }}; ip link delete {{ .Values.containerd.cni.bridge }}{{ end }}
{{- end }}
