//! Static pods in the manner of popular installers: a kubelet runs each of them.

use k8s_openapi::api::core::v1::{Pod, PodSpec};
use pod_sync_layout::SourceKind;

use crate::Snapshot;
use crate::decode::{ManifestOrigin, manifest};

const KUBEADM_API_SERVER: &str = r#"
apiVersion: v1
kind: Pod
metadata:
  annotations:
    kubeadm.kubernetes.io/kube-apiserver.advertise-address.endpoint: 192.0.2.10:6443
  creationTimestamp: null
  labels: {component: kube-apiserver, tier: control-plane}
  name: kube-apiserver
  namespace: kube-system
spec:
  containers:
  - command:
    - kube-apiserver
    - --advertise-address=192.0.2.10
    - --secure-port=6443
    image: registry.k8s.io/kube-apiserver:v1.36.2
    imagePullPolicy: IfNotPresent
    livenessProbe:
      failureThreshold: 8
      httpGet: {host: 192.0.2.10, path: /livez, port: probe-port, scheme: HTTPS}
      initialDelaySeconds: 10
      periodSeconds: 10
      timeoutSeconds: 15
    name: kube-apiserver
    ports:
    - containerPort: 6443
      name: probe-port
      protocol: TCP
    resources: {requests: {cpu: 250m}}
    startupProbe:
      failureThreshold: 24
      httpGet: {host: 192.0.2.10, path: /livez, port: probe-port, scheme: HTTPS}
    volumeMounts:
    - {mountPath: /etc/ssl/certs, name: ca-certs, readOnly: true}
    - {mountPath: /etc/kubernetes/pki, name: k8s-certs, readOnly: true}
  hostNetwork: true
  priority: 2000001000
  priorityClassName: system-node-critical
  securityContext:
    seccompProfile: {type: RuntimeDefault}
  volumes:
  - hostPath: {path: /etc/ssl/certs, type: DirectoryOrCreate}
    name: ca-certs
  - hostPath: {path: /etc/kubernetes/pki, type: DirectoryOrCreate}
    name: k8s-certs
status: {}
"#;

const KUBEADM_ETCD: &str = r#"
apiVersion: v1
kind: Pod
metadata:
  annotations: {kubeadm.kubernetes.io/etcd.advertise-client-urls: "https://192.0.2.10:2379"}
  name: etcd
  namespace: kube-system
spec:
  containers:
  - command: [etcd, --name=node1, --data-dir=/var/lib/etcd, --initial-cluster=node1=https://192.0.2.10:2380]
    image: registry.k8s.io/etcd:3.6.1-0
    name: etcd
    readinessProbe:
      httpGet: {host: 127.0.0.1, path: /readyz, port: 2381, scheme: HTTP}
    resources: {requests: {cpu: 100m, memory: 100Mi}}
    terminationMessagePolicy: FallbackToLogsOnError
    volumeMounts:
    - mountPath: /var/lib/etcd
      name: etcd-data
  hostNetwork: true
  priorityClassName: system-node-critical
  terminationGracePeriodSeconds: 60
  volumes:
  - hostPath: {path: /var/lib/etcd, type: DirectoryOrCreate}
    name: etcd-data
"#;

/// Labels without a value, an alias of the host, and capabilities.
const KUBE_VIP: &str = r#"
apiVersion: v1
kind: Pod
metadata:
  creationTimestamp: null
  labels:
    app.kubernetes.io/name:
    app.kubernetes.io/version: v1.0.0
  name: kube-vip
  namespace: kube-system
  uid: kube-vip-pod
spec:
  containers:
  - args:
    - manager
    env:
    - name: vip_arp
      value: "true"
    - name: vip_nodename
      valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
    - name: address
      value: 192.0.2.100
    image: ghcr.io/kube-vip/kube-vip:v1.0.0
    imagePullPolicy: IfNotPresent
    name: kube-vip
    resources: {}
    securityContext:
      capabilities:
        add: [NET_ADMIN, NET_RAW]
        drop: [ALL]
    volumeMounts:
    - {mountPath: /etc/kubernetes/admin.conf, name: kubeconfig}
  hostAliases:
  - hostnames: [kubernetes]
    ip: 127.0.0.1
  hostNetwork: true
  volumes:
  - hostPath: {path: /etc/kubernetes/admin.conf}
    name: kubeconfig
status: {}
"#;

// A volume without a source, and a key that stands twice.
const HAPROXY: &str = r#"
apiVersion: v1
kind: Pod
metadata:
  name: haproxy
  namespace: kube-system
  labels:
    addonmanager.kubernetes.io/mode: Reconcile
    k8s-app: haproxy
spec:
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  nodeSelector:
    kubernetes.io/os: linux
  containers:
  - name: haproxy
    image: haproxy:3.2
    imagePullPolicy: Always
    imagePullPolicy: IfNotPresent
    resources: {requests: {cpu: 25m, memory: 32M}}
    livenessProbe: {httpGet: {path: /healthz, port: 8081}}
    readinessProbe: {httpGet: {path: /healthz, port: 8081}}
    volumeMounts:
    - {mountPath: /usr/local/etc/haproxy/, name: etc-haproxy, readOnly: true}
    - {mountPath: /run/haproxy, name: run}
  volumes:
  - name: etc-haproxy
    hostPath: {path: /etc/haproxy}
  - name: run
"#;

/// Tools that are copied from an image, with octal modes and an annotation without a value.
const CILIUM: &str = r#"
apiVersion: v1
kind: Pod
metadata:
  name: cilium
  namespace: kube-system
  annotations:
    container.apparmor.security.beta.kubernetes.io/cilium-agent: unconfined
    prometheus.io/scrape:
spec:
  hostNetwork: true
  shareProcessNamespace: false
  restartPolicy: Always
  terminationGracePeriodSeconds: 1
  tolerations: [{operator: Exists}]
  initContainers:
  - name: mount-cgroup
    image: quay.io/cilium/cilium:v1.18.1
    command: [sh, -ec, "cp /usr/bin/cilium-mount /hostbin/cilium-mount"]
    env: [{name: BIN_PATH, value: /opt/cni/bin}, {name: EMPTY}]
    securityContext:
      privileged: false
      seLinuxOptions: {level: s0, type: spc_t}
      capabilities: {add: [SYS_ADMIN, SYS_CHROOT, SYS_PTRACE], drop: [ALL]}
    volumeMounts: [{name: cni-path, mountPath: /hostbin}]
  containers:
  - name: cilium-agent
    image: quay.io/cilium/cilium:v1.18.1
    command: [cilium-agent]
    args: [--config-dir=/tmp/cilium/config-map]
    startupProbe:
      httpGet: {host: 127.0.0.1, path: /healthz, port: 9879, scheme: HTTP, httpHeaders: [{name: brief, value: "true"}]}
      failureThreshold: 105
      periodSeconds: 2
    lifecycle:
      preStop: {exec: {command: [/cni-uninstall.sh]}}
    env:
    - {name: K8S_NODE_NAME, valueFrom: {fieldRef: {apiVersion: v1, fieldPath: spec.nodeName}}}
    - {name: GOMEMLIMIT, valueFrom: {resourceFieldRef: {resource: limits.memory, divisor: "1"}}}
    securityContext: {privileged: true}
    terminationMessagePolicy: FallbackToLogsOnError
    volumeMounts:
    - {name: bpf-maps, mountPath: /sys/fs/bpf, mountPropagation: Bidirectional}
    - {name: run, mountPath: /var/run/cilium}
    - {name: tools, mountPath: /opt/tools, subPath: bin, readOnly: true}
  volumes:
  - {name: tmp, emptyDir: {}}
  - {name: run, hostPath: {path: /var/run/cilium, type: DirectoryOrCreate}}
  - {name: bpf-maps, hostPath: {path: /sys/fs/bpf, type: DirectoryOrCreate}}
  - {name: cni-path, hostPath: {path: /opt/cni/bin, type: DirectoryOrCreate}}
  - {name: tools, image: {reference: "quay.io/example/tools:1"}}
"#;

const CALICO: &str = r#"{
  "apiVersion": "v1", "kind": "Pod",
  "metadata": {"name": "calico-node", "namespace": "kube-system", "labels": {"k8s-app": "calico-node"}, "annotations": null},
  "spec": {
    "hostNetwork": true, "nodeSelector": null, "serviceAccountName": "", "priorityClassName": "system-node-critical",
    "tolerations": [{"effect": "NoSchedule", "operator": "Exists"}, {"key": "CriticalAddonsOnly", "operator": "Exists"}],
    "initContainers": [{"name": "mount-bpffs", "image": "quay.io/calico/node:v3.30.2", "command": ["calico-node", "-init", "-best-effort"],
      "securityContext": {"privileged": true}, "env": null,
      "volumeMounts": [{"mountPath": "/sys/fs", "name": "sys-fs", "mountPropagation": "Bidirectional"}]}],
    "containers": [{"name": "calico-node", "image": "quay.io/calico/node:v3.30.2",
      "env": [{"name": "DATASTORE_TYPE", "value": "kubernetes"}, {"name": "IP", "value": null}],
      "resources": {"limits": null, "requests": {"cpu": 0.25}},
      "lifecycle": {"preStop": {"exec": {"command": ["/bin/calico-node", "-shutdown"]}}},
      "livenessProbe": {"exec": {"command": ["/bin/calico-node", "-felix-live"]}, "periodSeconds": 10, "initialDelaySeconds": 10},
      "readinessProbe": {"exec": {"command": ["/bin/calico-node", "-felix-ready"]}, "periodSeconds": 10},
      "volumeMounts": [{"mountPath": "/lib/modules", "name": "lib-modules", "readOnly": true}]}],
    "volumes": [{"name": "lib-modules", "hostPath": {"path": "/lib/modules"}},
      {"name": "sys-fs", "hostPath": {"path": "/sys/fs/", "type": "DirectoryOrCreate"}}]
  }
}"#;

fn pod_of(text: &str) -> (Pod, usize) {
    let mut out = Snapshot::default();
    let origin = ManifestOrigin { kind: SourceKind::File, place: "/m/pod.yaml", node: "node1" };
    manifest(text.as_bytes(), origin, &mut out);
    assert_eq!(out.problems, [], "{text}");
    let [pod] = &out.pods[..] else { panic!("{} pods in {text}", out.pods.len()) };
    ((**pod).clone(), out.warnings.len())
}

#[test]
fn static_pods_in_the_manner_of_installers_are_decoded() {
    for (text, name, warnings) in [
        (KUBEADM_API_SERVER, "kube-apiserver-node1", 0),
        (KUBEADM_ETCD, "etcd-node1", 1),
        (KUBE_VIP, "kube-vip-node1", 0),
        (HAPROXY, "haproxy-node1", 1),
        (CILIUM, "cilium-node1", 0),
        (CALICO, "calico-node-node1", 1),
    ] {
        let (pod, got) = pod_of(text);
        assert_eq!((pod.metadata.name.as_deref(), got), (Some(name), warnings), "{text}");
        assert_eq!(pod.metadata.namespace.as_deref(), Some("kube-system"), "{name}");
    }
}

#[test]
fn unusual_fields_of_these_pods_have_the_meaning_that_a_kubelet_gives_them() {
    let spec = |text: &str| -> PodSpec { pod_of(text).0.spec.unwrap() };
    assert_eq!(pod_of(KUBE_VIP).0.metadata.labels.unwrap()["app.kubernetes.io/name"], "");
    assert_eq!(pod_of(KUBE_VIP).0.metadata.uid.as_deref(), Some("kube-vip-pod"));
    assert_eq!(pod_of(CILIUM).0.metadata.annotations.unwrap()["prometheus.io/scrape"], "");
    let haproxy = spec(HAPROXY);
    assert_eq!(haproxy.containers[0].image_pull_policy.as_deref(), Some("IfNotPresent"));
    assert!(haproxy.volumes.unwrap()[1].empty_dir.is_some());
    let cilium = spec(CILIUM);
    assert_eq!(cilium.containers[0].volume_mounts.as_ref().unwrap()[2].sub_path.as_deref(), Some("bin"));
    let calico = spec(CALICO);
    let requests = calico.containers[0].resources.as_ref().unwrap().requests.as_ref().unwrap();
    assert_eq!(requests["cpu"].0, "0.25");
    let port = &spec(KUBEADM_API_SERVER).containers[0].ports.clone().unwrap()[0];
    assert_eq!(
        (port.host_port, port.container_port),
        (Some(6443), 6443),
        "the port of a pod in the host's network"
    );
}
