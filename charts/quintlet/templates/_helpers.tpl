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

{{/* The directory in which the runtime has its images and snapshots. */}}
{{- define "quintlet.runtimeRoot" -}}
{{- .Values.containerd.rootDir | default (ternary "/var/lib/quintlet-containerd" "" .Values.containerd.enabled) -}}
{{- end }}

{{/* Which parts see the node identity. */}}
{{- define "quintlet.hasKubeconfig" -}}
{{- if or .Values.kubeconfig.hostPath .Values.kubeconfig.secretName }}true{{ end }}
{{- end }}

{{/* The path of the kubeconfig in a service's container. Takes root and part. */}}
{{- define "quintlet.kubeconfig" -}}
{{- $values := .root.Values -}}
{{- if and $values.bootstrap.enabled (ne .part "pod-sync") -}}
{{ $values.host.runDir }}/credentials/kubeconfig
{{- else -}}
/etc/quintlet/credentials/{{ if $values.kubeconfig.secretName }}kubeconfig{{ else }}{{ base $values.kubeconfig.hostPath }}{{ end }}
{{- end }}
{{- end }}

{{/* Whether nodes request their first certificate with the token of a service account. */}}
{{- define "quintlet.bootstrapsByAccount" -}}
{{- $bootstrap := .Values.bootstrap -}}
{{- if and $bootstrap.enabled (not $bootstrap.secretName) (not $bootstrap.hostPath) }}true{{ end }}
{{- end }}

{{/* The service of a part. A part is a service, a further instance of probe-service, or a follower of pleg-service. */}}
{{- define "quintlet.serviceOf" -}}
{{- if hasPrefix "probe-service-" . }}probe-service{{ else if hasPrefix "pleg-follower-" . }}pleg-service{{ else }}{{ . }}{{ end }}
{{- end }}

{{/* The number of an instance or a follower in the name of a part; nothing for the first one. */}}
{{- define "quintlet.numberOf" -}}
{{- regexFind "[0-9]+$" . }}
{{- end }}

{{/* The directory in which a part has its sockets. Takes root and part. */}}
{{- define "quintlet.runDir" -}}
{{ .root.Values.host.runDir }}{{ if hasPrefix "pleg-follower-" .part }}/followers/{{ include "quintlet.numberOf" .part }}{{ end }}
{{- end }}

{{/* Whether a part is one of several instances, whose sockets are in one directory. Takes root and part. */}}
{{- define "quintlet.isInstance" -}}
{{- if and (hasPrefix "probe-service" .part) (gt (int .root.Values.probeService.instances) 1) }}true{{ end }}
{{- end }}

{{/* The node API asks the API server who its clients are: without a node identity there is none. */}}
{{- define "quintlet.hasNodeApi" -}}
{{- if and .Values.nodeApi.enabled (include "quintlet.hasKubeconfig" .) }}true{{ end }}
{{- end }}

{{/* The instances of probe-service, as a JSON list of parts. */}}
{{- define "quintlet.probeParts" -}}
{{- $parts := list "probe-service" -}}
{{- range $number := untilStep 1 (int .Values.probeService.instances) 1 }}{{ $parts = append $parts (printf "probe-service-%d" $number) }}{{ end -}}
{{- toJson $parts -}}
{{- end }}

{{/* The followers of pleg-service, as a JSON list of parts. */}}
{{- define "quintlet.followerParts" -}}
{{- $parts := list -}}
{{- range $number := untilStep 1 (int (add .Values.plegService.followers 1)) 1 }}{{ $parts = append $parts (printf "pleg-follower-%d" $number) }}{{ end -}}
{{- toJson $parts -}}
{{- end }}

{{/* Not empty if somebody may subscribe to containers, probes and pods. */}}
{{- define "quintlet.hasSubscribers" -}}
{{- if or .Values.subscribers.uids .Values.subscribers.gids .Values.subscribers.tls.listen }}yes{{ end -}}
{{- end }}

{{/*
The directories of each part below runDir, as `name: owner group mode`: owner and group are root or a name in `users`. Nothing
for a directory that is another part's. A socket directory is mounted only into its server and its clients. The table of users and
sockets is in docs/design/sockets.md.
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
  {{- if include "quintlet.hasSubscribers" . }}
  subscribe/pleg: pleg pleg 0755
  {{- end }}
{{- range $number := untilStep 1 (int (add .Values.plegService.followers 1)) 1 }}
pleg-follower-{{ $number }}:
  pleg: ""
  followers/{{ $number }}/pleg: pleg watch 2750
{{- end }}
{{- range $part := include "quintlet.probeParts" . | fromJsonArray }}
{{ $part }}:
  cri/probe: ""
  probe: probe nodeApi 2750
  {{- if include "quintlet.hasSubscribers" $ }}
  subscribe/probe: probe probe 0755
  {{- end }}
{{- end }}
status-reporter:
  pleg: ""
  podsync: ""
  status: reporter nodeApi 2750
  {{- if .Values.bootstrap.enabled }}
  credentials: ""
  {{- end }}
node-api:
  cri/node-api: ""
  podsync: ""
  pleg: ""
  probe: ""
  status: ""
  node-api: nodeApi nodeApi 0700
  {{- if .Values.subscribers.tls.listen }}
  # node-api subscribes for clients over TCP.
  subscribe/pleg: ""
  subscribe/probe: ""
  subscribe/podsync: ""
  {{- end }}
  {{- if .Values.bootstrap.enabled }}
  credentials: ""
  serving: ""
  {{- end }}
pod-sync:
  {{- if .Values.bootstrap.enabled }}
  # Copies of what pod-sync renews, for services without root.
  credentials: root watch 2750
  serving: root nodeApi 2750
  {{- end }}
  cri/sync: ""
  pleg: ""
  probe: ""
  status: ""
  podsync: root watch 2750
  {{- if include "quintlet.hasSubscribers" . }}
  subscribe/podsync: root root 0755
  {{- end }}
  keys: root root 0700
  state: root root 0700
{{- end }}

{{/* The id of a part's user, or of root. Takes root and part. */}}
{{- define "quintlet.user" -}}
{{- $names := dict "pleg-service" "pleg" "probe-service" "probe" "status-reporter" "reporter" "node-api" "nodeApi" -}}
{{- int (get .root.Values.users (get $names (include "quintlet.serviceOf" .part) | default "root")) -}}
{{- end }}

{{/* Arguments of one service. Takes root and part. */}}
{{- define "quintlet.args" -}}
{{- $values := .root.Values -}}
{{- $service := include "quintlet.serviceOf" .part -}}
{{- if $values.config }}
- --config=/etc/quintlet/config/config.yaml
{{- end }}
- --run-dir={{ include "quintlet.runDir" . }}
- --log-format={{ $values.log.format }}
- --log-level={{ $values.log.level }}
{{- with $values.otlpEndpoint }}
- --otlp-endpoint={{ . }}
{{- end }}
{{- if and $values.metrics.enabled (hasKey $values.metrics.ports .part) }}
- --metrics-listen=127.0.0.1:{{ int (index $values.metrics.ports .part) }}
{{- end }}
{{- if hasPrefix "probe-service-" .part }}
- --id={{ include "quintlet.numberOf" .part }}
{{- end }}
{{- if hasPrefix "pleg-follower-" .part }}
- --follow={{ $values.host.runDir }}/pleg/pleg.sock
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
{{- if and (has $service (list "pleg-service" "probe-service" "pod-sync")) (not (hasPrefix "pleg-follower-" .part)) }}
{{- range $values.subscribers.uids }}
- --subscriber-uid={{ int . }}
{{- end }}
{{- range $values.subscribers.gids }}
- --subscriber-gid={{ int . }}
{{- end }}
{{- with $values.subscribers.tls.listen }}
- --subscriber-listen={{ . }}
- --subscriber-relay-uid={{ int $values.users.nodeApi }}
{{- end }}
{{- end }}
{{- if and (eq .part "node-api") $values.subscribers.tls.listen }}
- --subscriber-listen={{ $values.subscribers.tls.listen }}
- --subscriber-cert-file=/etc/quintlet/subscribers/tls.crt
- --subscriber-key-file=/etc/quintlet/subscribers/tls.key
- --subscriber-client-ca-file=/etc/quintlet/subscribers/ca.crt
{{- range $values.subscribers.tls.names }}
- {{ printf "--subscriber-name=%s" . | quote }}
{{- end }}
{{- end }}
{{- if has $service (list "pleg-service" "pod-sync") }}
- --observer-uid={{ int $values.users.reporter }}
{{- end }}
{{- if and (has $service (list "pleg-service" "probe-service" "status-reporter")) (include "quintlet.hasNodeApi" .root) }}
- --observer-uid={{ int $values.users.nodeApi }}
{{- end }}
{{- if has .part (list "status-reporter" "pod-sync" "node-api") }}
- --node-name=$(NODE_NAME){{ $values.node.nameSuffix }}
{{- if include "quintlet.hasKubeconfig" .root }}
- --kubeconfig={{ include "quintlet.kubeconfig" . }}
{{- end }}
{{- end }}
{{- if and $values.bootstrap.enabled (eq .part "pod-sync") }}
- --bootstrap-kubeconfig=/etc/quintlet/bootstrap/{{ if $values.bootstrap.hostPath }}{{ base $values.bootstrap.hostPath }}{{ else }}kubeconfig{{ end }}
- --cert-dir=/etc/quintlet/credentials/pki
- --rotate-certificates=true
{{- end }}
{{- if and $values.bootstrap.servingCertificate (has .part (list "pod-sync" "node-api")) }}
- --rotate-server-certificates=true
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
{{- if $values.bootstrap.servingCertificate }}
- --issued-certificate-file={{ $values.host.runDir }}/serving/kubelet-server-current.pem
{{- end }}
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
{{- range ternary $values.plegService.followerArgs (index $values.services $service).extraArgs (hasPrefix "pleg-follower-" .part) }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* One service's container. Takes root and part. */}}
{{- define "quintlet.container" -}}
{{- $values := .root.Values -}}
{{- $part := .part -}}
{{- $service := include "quintlet.serviceOf" .part -}}
{{- $env := concat ($values.extraEnv | default list) ((index $values.services $service).extraEnv | default list) -}}
{{- $named := has $part (list "status-reporter" "pod-sync" "node-api") -}}
- name: {{ $part }}
  {{- include "quintlet.image" (dict "root" .root "image" "services") | nindent 2 }}
  command: [{{ $service }}]
  args:
    {{- include "quintlet.args" . | nindent 4 }}
  {{- if eq $part "node-api" }}
  ports:
    - { name: https, containerPort: {{ int $values.nodeApi.port }} }
  {{- end }}
  env:
    - name: NODE_NAME
      valueFrom: { fieldRef: { fieldPath: spec.nodeName } }
    {{- if not $named }}
    # For traces: these services have no argument for the name.
    - name: QUINTLET_NODE_NAME
      value: $(NODE_NAME){{ $values.node.nameSuffix }}
    {{- end }}
    {{- with $env }}
    {{- toYaml . | nindent 4 }}
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
    exec: { command: [quintctl, --run-dir={{ if include "quintlet.isInstance" . }}/run/self{{ else }}{{ include "quintlet.runDir" . }}{{ end }}, health, --live, {{ $service }}] }
    {{- toYaml $values.probes.liveness | nindent 4 }}
  readinessProbe:
    exec: { command: [quintctl, --run-dir={{ if include "quintlet.isInstance" . }}/run/self{{ else }}{{ include "quintlet.runDir" . }}{{ end }}, health, {{ $service }}] }
    {{- toYaml $values.probes.readiness | nindent 4 }}
  resources:
    {{- toYaml (index $values.services $service).resources | nindent 4 }}
  volumeMounts:
    {{- range $dir, $owner := index (include "quintlet.dirs" .root | fromYaml) $part }}
    - { name: run-{{ $dir | replace "/" "-" }}, mountPath: {{ $values.host.runDir }}/{{ $dir }} }
    {{- end }}
    {{- if include "quintlet.isInstance" . }}
    # Has the socket of this instance only, for its probes.
    - { name: self-{{ $part }}, mountPath: /run/self/probe, readOnly: true }
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
    - { name: runtime-root, mountPath: {{ include "quintlet.runtimeRoot" .root }}, readOnly: true }
    - { name: pod-logs, mountPath: {{ $values.host.podLogsDir }}, readOnly: true }
    - { name: node-api-certs, mountPath: {{ $values.nodeApi.certDir }} }
    {{- if $values.nodeApi.clientCAFile }}
    # A directory: a mount of the file alone would show the old file after it is replaced.
    - { name: client-ca, mountPath: /etc/quintlet/client-ca, readOnly: true }
    {{- end }}
    # For machine_info and cadvisor_version_info of /metrics/cadvisor.
    - { name: machine-id, mountPath: /etc/machine-id, readOnly: true }
    - { name: os-release, mountPath: /etc/os-release, readOnly: true }
    {{- if $values.subscribers.tls.listen }}
    # The whole secret: node-api sees its renewed files.
    - { name: subscribers, mountPath: /etc/quintlet/subscribers, readOnly: true }
    {{- end }}
    # For the memory of the node and what the runtime omits of pods.
    - { name: cgroup, mountPath: /sys/fs/cgroup, readOnly: true }
    {{- end }}
    {{- if and $values.bootstrap.enabled (eq $part "pod-sync") }}
    # pod-sync writes the kubeconfig, certificates and keys there.
    - { name: kubeconfig, mountPath: /etc/quintlet/credentials }
    - { name: bootstrap, mountPath: /etc/quintlet/bootstrap, readOnly: true }
    {{- else if and $named (include "quintlet.hasKubeconfig" .root) (not $values.bootstrap.enabled) }}
    # The whole directory or secret: a mount of the file alone would show the old file after it is replaced.
    - { name: kubeconfig, mountPath: /etc/quintlet/credentials, readOnly: true }
    {{- end }}
    {{- if eq $part "pod-sync" }}
    - { name: root, mountPath: {{ $values.host.rootDir }}, mountPropagation: Bidirectional }
    # For the space that is left for images: eviction and image garbage collection.
    - { name: runtime-root, mountPath: {{ include "quintlet.runtimeRoot" .root }}, readOnly: true }
    - { name: pod-logs, mountPath: {{ $values.host.podLogsDir }} }
    {{- if $values.host.containerLogsDir }}
    - { name: container-logs, mountPath: {{ $values.host.containerLogsDir }} }
    {{- end }}
    - { name: cgroup, mountPath: /sys/fs/cgroup }
    - { name: machine-id, mountPath: /etc/machine-id, readOnly: true }
    # For the operating system in the Node.
    - { name: os-release, mountPath: /etc/os-release, readOnly: true }
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
      {{- if include "quintlet.isInstance" . }}
      # A client trusts a socket in a directory of the user that serves it.
      ln -sf {{ $run }}/probe/{{ include "quintlet.numberOf" .part | default "0" }}.sock /run/self/probe/; chown {{ int $users.probe }}:{{ int $users.probe }} /run/self/probe
      {{- end }}
  securityContext:
    runAsUser: 0
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: { drop: [ALL], add: [CHOWN, FOWNER, FSETID] }
    seccompProfile: { type: RuntimeDefault }
  {{- with .root.Values.initResources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    {{- range $dir, $owner := index (include "quintlet.dirs" .root | fromYaml) .part }}
    {{- if $owner }}
    - { name: run-{{ $dir | replace "/" "-" }}, mountPath: {{ $run }}/{{ $dir }} }
    {{- end }}
    {{- end }}
    {{- if eq .part "node-api" }}
    - { name: node-api-certs, mountPath: {{ .root.Values.nodeApi.certDir }} }
    {{- end }}
    {{- if include "quintlet.isInstance" . }}
    - { name: self-{{ .part }}, mountPath: /run/self/probe }
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
    {{- with .Values.containerd.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
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
    - { name: runtime-root, mountPath: {{ include "quintlet.runtimeRoot" . }} }
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
{{- end }}
{{- if has "node-api" .parts }}
- name: node-api-certs
  hostPath: { path: {{ $values.nodeApi.certDir }}, type: DirectoryOrCreate }
{{- end }}
{{- if and (has "node-api" .parts) $values.subscribers.tls.listen }}
- name: subscribers
  secret: { secretName: {{ $values.subscribers.tls.secretName }}, defaultMode: 0440 }
{{- end }}
{{- if and (has "node-api" .parts) $values.nodeApi.clientCAFile }}
- name: client-ca
  hostPath: { path: {{ dir $values.nodeApi.clientCAFile }}, type: Directory }
{{- end }}
{{- range .parts }}
{{- if include "quintlet.isInstance" (dict "root" $.root "part" .) }}
- name: self-{{ . }}
  emptyDir: {}
{{- end }}
{{- end }}
{{- $named := or (has "status-reporter" .parts) (has "node-api" .parts) }}
{{- if and (include "quintlet.hasKubeconfig" .root) (or (has "pod-sync" .parts) (and $named (not $values.bootstrap.enabled))) }}
- name: kubeconfig
  {{- if $values.kubeconfig.secretName }}
  secret: { secretName: {{ $values.kubeconfig.secretName }}, defaultMode: 0440 }
  {{- else }}
  hostPath: { path: {{ dir $values.kubeconfig.hostPath }}, type: {{ if $values.bootstrap.enabled }}DirectoryOrCreate{{ else }}Directory{{ end }} }
  {{- end }}
{{- end }}
{{- if and $values.bootstrap.enabled (has "pod-sync" .parts) }}
- name: bootstrap
  {{- if $values.bootstrap.secretName }}
  secret: { secretName: {{ $values.bootstrap.secretName }}, defaultMode: 0400 }
  {{- else if $values.bootstrap.hostPath }}
  hostPath: { path: {{ dir $values.bootstrap.hostPath }}, type: Directory }
  {{- else }}
  projected:
    defaultMode: 0400
    sources:
      - serviceAccountToken: { path: token, expirationSeconds: 3600 }
      - configMap: { name: kube-root-ca.crt, items: [{ key: ca.crt, path: ca.crt }] }
      - configMap: { name: {{ include "quintlet.name" .root }}-bootstrap, items: [{ key: kubeconfig, path: kubeconfig }] }
  {{- end }}
{{- end }}
{{- if or (has "pod-sync" .parts) (has "containerd" .parts) (has "node-api" .parts) }}
- name: runtime-root
  hostPath: { path: {{ include "quintlet.runtimeRoot" .root }}, type: {{ if $values.containerd.enabled }}DirectoryOrCreate{{ else }}Directory{{ end }} }
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
{{- if or (has "pod-sync" .parts) (has "node-api" .parts) }}
- name: machine-id
  hostPath: { path: /etc/machine-id, type: File }
- name: os-release
  hostPath: { path: /etc/os-release, type: File }
{{- end }}
{{- if has "pod-sync" .parts }}
{{- if $values.host.containerLogsDir }}
- name: container-logs
  hostPath: { path: {{ $values.host.containerLogsDir }}, type: DirectoryOrCreate }
{{- end }}
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
for dir in {{ $host.rootDir }} {{ $host.runDir }}{{ if .Values.containerd.enabled }} {{ include "quintlet.runtimeRoot" . }}{{ end }}; do below() { awk -v dir="$dir/" 'index($2, dir) == 1 { print $2 }' /proc/mounts; }; below | sort -r | xargs -r umount; [ -n "$(below)" ] || rm -rf "$dir"; done; rm -rf {{ $host.podLogsDir }} {{ .Values.nodeApi.certDir }}{{ if .Values.bootstrap.enabled }} {{ .Values.kubeconfig.hostPath }} {{ dir .Values.kubeconfig.hostPath }}/pki{{ end }}; find /sys/fs/cgroup -depth -type d \( -path '/sys/fs/cgroup*{{ $host.cgroupRoot }}' -o -path '/sys/fs/cgroup*{{ $host.cgroupRoot }}/*' \) -exec rmdir {} +{{ if .Values.containerd.enabled }}; ip link delete {{ .Values.containerd.cni.bridge }}{{ end }}
{{- end }}
