use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::static_pod;
use crate::defaults::set_defaults;

fn pod() -> Value {
    json!({
        "metadata": {"name": "a", "namespace": "n", "uid": "u"},
        "spec": {
            "containers": [{"name": "c", "image": "i"}],
            "volumes": [{"name": "v", "emptyDir": {}}],
        },
    })
}

fn errors(pod: Value) -> Vec<String> {
    let mut pod: Pod = serde_json::from_value(pod).unwrap();
    set_defaults(&mut pod);
    static_pod(&pod).into_iter().map(|e| format!("{}: {}", e.field, e.message)).collect()
}

/// Sets a value at a JSON pointer, creating objects on the way.
fn with(pointer: &str, value: Value) -> Value {
    let mut pod = pod();
    let mut at = &mut pod;
    for step in pointer.split('/').skip(1) {
        at = match step.parse::<usize>() {
            Ok(index) => &mut at[index],
            Err(_) => &mut at[step],
        };
    }
    *at = value;
    pod
}

fn assert_errors(cases: &[(&str, Value, &[&str])]) {
    for (pointer, value, want) in cases {
        let got = errors(with(pointer, value.clone()));
        let matches =
            got.len() == want.len() && got.iter().zip(*want).all(|(got, want)| got.starts_with(want));
        assert!(matches, "{pointer} {value}:\n{got:#?}\nwant {want:#?}");
    }
}

const C: &str = "/spec/containers/0";

fn of_container(cases: &[(&str, Value, &[&str])]) {
    for (pointer, value, want) in cases {
        let pointer = format!("{C}{pointer}");
        assert_errors(&[(&pointer, value.clone(), want)]);
    }
}

#[test]
fn a_pod_that_a_kubelet_accepts_has_no_errors() {
    assert_eq!(errors(pod()), Vec::<String>::new());
    of_container(&[
        (
            "/ports",
            json!([{"containerPort": 1, "name": "http-2"}, {"containerPort": 65535, "hostPort": 0}]),
            &[],
        ),
        ("/env", json!([{"name": "1.a-b $x", "value": "y"}, {"name": "A", "value": ""}]), &[]),
        (
            "/env",
            json!([{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['a.b/c']"}}}]),
            &[],
        ),
        ("/env", json!([{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.host"}}}]), &[]),
        (
            "/env",
            json!([{"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.hugepages-2Mi", "divisor": "1024Ki"}}}]),
            &[],
        ),
        (
            "/envFrom",
            json!([{"configMapRef": {"name": "c-"}, "prefix": "x."}, {"secretRef": {"name": "s"}}]),
            &[],
        ),
        ("/imagePullPolicy", json!(""), &[]),
        ("/terminationMessagePolicy", json!(""), &[]),
        ("/ports", json!([{"containerPort": 1, "protocol": ""}]), &[]),
        (
            "/lifecycle",
            json!({"preStop": {"sleep": {"seconds": 0}}, "postStart": {"httpGet": {"port": "web"}}}),
            &[],
        ),
        ("/livenessProbe", json!({"grpc": {"port": 1}, "periodSeconds": 0}), &[]),
        ("/readinessProbe", json!({"tcpSocket": {"port": "web"}, "successThreshold": 5}), &[]),
        (
            "/resources",
            json!({"limits": {"cpu": "1e-1", "memory": "1.5Gi", "hugepages-2Mi": "4Mi", "a.b/c": "2"}}),
            &[],
        ),
        ("/resources", json!({"requests": {"ephemeral-storage": "+1E"}}), &[]),
        ("/restartPolicy", json!("Never"), &[]),
        (
            "/securityContext",
            json!({"runAsUser": 0, "runAsGroup": 2_147_483_647_i64, "procMount": "Default"}),
            &[],
        ),
        (
            "/securityContext",
            json!({"seccompProfile": {"type": "Localhost", "localhostProfile": "a/b.json"}}),
            &[],
        ),
        ("/volumeMounts", json!([{"name": "v", "mountPath": "../x", "subPath": "a..b"}]), &[]),
        ("/workingDir", json!("../x"), &[]),
    ]);
    assert_errors(&[
        ("/spec/restartPolicy", json!(""), &[]),
        ("/spec/dnsPolicy", json!(""), &[]),
        ("/spec/terminationGracePeriodSeconds", json!(-1), &[]),
        ("/spec/tolerations", json!([{"operator": "Exists"}, {"key": "a", "value": "b"}]), &[]),
        ("/spec/hostAliases", json!([{"ip": "010.0.0.1", "hostnames": ["a.b"]}, {"ip": "::1"}]), &[]),
        ("/spec/dnsConfig", json!({"nameservers": ["1.1.1.1"], "searches": ["_a.b.", "."]}), &[]),
        (
            "/spec/securityContext",
            json!({"sysctls": [{"name": "net/ipv4/tcp_syncookies", "value": ""}]}),
            &[],
        ),
        ("/spec/volumes", json!([{"name": "v", "hostPath": {"path": "/x"}}]), &[]),
        (
            "/spec/volumes",
            json!([{"name": "v", "configMap": {"name": "c", "items": [{"key": "k", "path": "a/b"}]}}]),
            &[],
        ),
        ("/metadata/labels", json!({"a.b/C_d": "", "x": "Y.z"}), &[]),
        ("/metadata/annotations", json!({"A.b/C": "anything\n"}), &[]),
    ]);
}

#[test]
fn ports_are_numbers_from_1_to_65535_or_names() {
    const RANGE: &str = "must be between 1 and 65535, inclusive";
    let at = "spec.containers[0]";
    of_container(&[
        ("/ports", json!([{"containerPort": 0}]), &[&format!("{at}.ports[0].containerPort: Required value")]),
        (
            "/ports",
            json!([{"containerPort": 65536}]),
            &[&format!("{at}.ports[0].containerPort: Invalid value: 65536: {RANGE}")],
        ),
        (
            "/ports",
            json!([{"containerPort": 1, "hostPort": -1}]),
            &[&format!("{at}.ports[0].hostPort: Invalid value: -1: {RANGE}")],
        ),
        (
            "/ports",
            json!([{"containerPort": 1, "hostPort": 2}, {"containerPort": 3, "hostPort": 2}]),
            &[&format!("{at}.ports[1].hostPort: Duplicate value: \"TCP//2\"")],
        ),
        (
            "/ports",
            json!([{"containerPort": 1, "name": "A--much-too-long"}]),
            &[
                &format!(
                    "{at}.ports[0].name: Invalid value: \"A--much-too-long\": must be no more than 15 characters"
                ),
                &format!(
                    "{at}.ports[0].name: Invalid value: \"A--much-too-long\": must contain only alpha-numeric"
                ),
                &format!(
                    "{at}.ports[0].name: Invalid value: \"A--much-too-long\": must not contain consecutive"
                ),
            ],
        ),
        (
            "/ports",
            json!([{"containerPort": 1, "protocol": "ICMP"}]),
            &[&format!(
                "{at}.ports[0].protocol: Unsupported value: \"ICMP\": supported values: \"SCTP\", \"TCP\", \"UDP\""
            )],
        ),
        (
            "/livenessProbe",
            json!({"httpGet": {"port": 0}}),
            &[&format!("{at}.livenessProbe.httpGet.port: Invalid value: 0: {RANGE}")],
        ),
        (
            "/startupProbe",
            json!({"tcpSocket": {"port": "12"}}),
            &[&format!(
                "{at}.startupProbe.tcpSocket.port: Invalid value: \"12\": must contain at least one letter"
            )],
        ),
        (
            "/readinessProbe",
            json!({"grpc": {"port": -1}}),
            &[&format!("{at}.readinessProbe.grpc.port: Invalid value: -1: {RANGE}")],
        ),
    ]);
    let mut host = with("/spec/hostNetwork", json!(true));
    host["spec"]["containers"][0]["ports"] =
        json!([{"containerPort": 1}, {"containerPort": 2, "hostPort": 3}]);
    assert_eq!(
        errors(host),
        [
            "spec.containers[0].ports[1].hostPort: Invalid value: 3: must match `containerPort` when `hostNetwork` is true"
        ]
    );
}

#[test]
fn a_hook_and_a_probe_have_one_handler_that_is_complete() {
    let at = "spec.containers[0]";
    of_container(&[
        (
            "/lifecycle",
            json!({"postStart": {}, "preStop": {}}),
            &[
                &format!("{at}.lifecycle.postStart: Required value: must specify a handler type"),
                &format!("{at}.lifecycle.preStop: Required value: must specify a handler type"),
            ],
        ),
        (
            "/lifecycle",
            json!({"preStop": {"exec": {"command": ["x"]}, "sleep": {"seconds": 1}}}),
            &[&format!("{at}.lifecycle.preStop.sleep: Forbidden: may not specify more than 1 handler type")],
        ),
        (
            "/lifecycle",
            json!({"preStop": {"sleep": {"seconds": 31}}}),
            &[&format!(
                "{at}.lifecycle.preStop.sleep: Invalid value: 31: must be non-negative and less than terminationGracePeriodSeconds (30)"
            )],
        ),
        (
            "/lifecycle",
            json!({"preStop": {"exec": {}}}),
            &[&format!("{at}.lifecycle.preStop.exec.command: Required value")],
        ),
        (
            "/lifecycle",
            json!({"stopSignal": "SIGTERM"}),
            &[&format!(
                "{at}.lifecycle.stopSignal: Forbidden: may not be set for containers with empty `spec.os.name`"
            )],
        ),
        (
            "/livenessProbe",
            json!({}),
            &[&format!("{at}.livenessProbe: Required value: must specify a handler type")],
        ),
        (
            "/livenessProbe",
            json!({"exec": {"command": ["x"]}, "failureThreshold": -1, "successThreshold": 2}),
            &[
                &format!(
                    "{at}.livenessProbe.failureThreshold: Invalid value: -1: must be greater than or equal to 0"
                ),
                &format!("{at}.livenessProbe.successThreshold: Invalid value: 2: must be 1"),
            ],
        ),
        (
            "/livenessProbe",
            json!({"exec": {"command": ["x"]}, "terminationGracePeriodSeconds": 0}),
            &[&format!(
                "{at}.livenessProbe.terminationGracePeriodSeconds: Invalid value: 0: must be greater than 0"
            )],
        ),
        (
            "/readinessProbe",
            json!({"exec": {"command": ["x"]}, "terminationGracePeriodSeconds": 1}),
            &[&format!(
                "{at}.readinessProbe.terminationGracePeriodSeconds: Invalid value: 1: must not be set for readinessProbes"
            )],
        ),
        (
            "/livenessProbe",
            json!({"httpGet": {"port": 1, "protocol": "HTTP2", "scheme": "HTTPS", "host": "h"}}),
            &[
                &format!(
                    "{at}.livenessProbe.httpGet.protocol: Invalid value: \"HTTP2\": must be used with scheme HTTP"
                ),
                &format!("{at}.livenessProbe.httpGet.host: Forbidden: may not be set when protocol is HTTP2"),
            ],
        ),
        (
            "/livenessProbe",
            json!({"httpGet": {"port": 1, "protocol": "HTTP3"}}),
            &[&format!(
                "{at}.livenessProbe.httpGet.protocol: Unsupported value: \"HTTP3\": supported values: \"HTTP1\", \"HTTP2\""
            )],
        ),
        (
            "/livenessProbe",
            json!({"grpc": {"port": 1, "mode": "Verify"}}),
            &[&format!(
                "{at}.livenessProbe.grpc.mode: Unsupported value: \"Verify\": supported values: \"Plaintext\", \"TLS\""
            )],
        ),
        ("/livenessProbe", json!({"httpGet": {"port": 1, "protocol": "HTTP2", "host": ""}}), &[]),
        (
            "/livenessProbe",
            json!({"httpGet": {"port": 1, "scheme": "FTP", "httpHeaders": [{"name": "a b", "value": ""}]}}),
            &[
                &format!(
                    "{at}.livenessProbe.httpGet.scheme: Unsupported value: \"FTP\": supported values: \"HTTP\", \"HTTPS\""
                ),
                &format!(
                    "{at}.livenessProbe.httpGet.httpHeaders: Invalid value: \"a b\": a valid HTTP header must"
                ),
            ],
        ),
    ]);
    for (signal, is_signal) in [
        ("SIGTERM", true),
        ("SIGRTMIN+15", true),
        ("SIGRTMIN+16", false),
        ("SIGRTMAX-0", false),
        ("TERM", false),
    ] {
        let mut pod = with("/spec/os", json!({"name": "linux"}));
        pod["spec"]["containers"][0]["lifecycle"] = json!({"stopSignal": signal});
        assert_eq!(errors(pod).is_empty(), is_signal, "{signal}");
    }
    let init = |extra: Value| {
        let mut container = json!({"name": "i", "image": "i", "livenessProbe": {"exec": {"command": ["x"]}}});
        container.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        errors(with("/spec/initContainers", json!([container])))
    };
    assert_eq!(
        init(json!({"lifecycle": {}})),
        [
            "spec.initContainers[0].lifecycle: Forbidden: may not be set for init containers without restartPolicy=Always",
            "spec.initContainers[0].livenessProbe: Forbidden: may not be set for init containers without restartPolicy=Always",
        ]
    );
    assert_eq!(init(json!({"restartPolicy": "Always"})), Vec::<String>::new());
}

#[test]
fn names_have_their_format() {
    let long = "x".repeat(64);
    assert_errors(&[
        (
            "/metadata/name",
            json!("../a"),
            &["metadata.name: Invalid value: \"../a\": a lowercase RFC 1123 subdomain"],
        ),
        (
            "/metadata/name",
            json!("x".repeat(254)),
            &[&format!(
                "metadata.name: Invalid value: \"{}\": must be no more than 253 bytes",
                "x".repeat(254)
            )],
        ),
        (
            "/metadata/namespace",
            json!("a.b"),
            &["metadata.namespace: Invalid value: \"a.b\": a lowercase RFC 1123 label"],
        ),
        ("/metadata/namespace", json!(""), &["metadata.namespace: Required value"]),
        (
            "/metadata/labels",
            json!({"/x": "y"}),
            &["metadata.labels: Invalid value: \"/x\": prefix part must be non-empty"],
        ),
        (
            "/metadata/labels",
            json!({"x": "-y"}),
            &["metadata.labels: Invalid value: \"-y\": a valid label must be"],
        ),
        (
            "/metadata/annotations",
            json!({"a/b/c": ""}),
            &["metadata.annotations: Invalid value: \"a/b/c\": a qualified name"],
        ),
        (
            "/metadata/annotations",
            json!({"a": "x".repeat(262_144)}),
            &["metadata.annotations: Too long: may not be more than 262144 bytes"],
        ),
        (
            "/metadata/finalizers",
            json!(["x"]),
            &["metadata.finalizers[0]: Invalid value: \"x\": name is neither a standard"],
        ),
        (
            "/spec/hostname",
            json!("a.b"),
            &["spec.hostname: Invalid value: \"a.b\": a lowercase RFC 1123 label"],
        ),
        (
            "/spec/subdomain",
            json!("-"),
            &["spec.subdomain: Invalid value: \"-\": a lowercase RFC 1123 label"],
        ),
        (
            "/spec/hostnameOverride",
            json!(format!("{long}.b")),
            &["spec.hostnameOverride: Too long: may not be more than 64 bytes"],
        ),
        (
            "/spec/priorityClassName",
            json!("A"),
            &["spec.priorityClassName: Invalid value: \"A\": a lowercase RFC 1123"],
        ),
        (
            "/spec/runtimeClassName",
            json!(""),
            &["spec.runtimeClassName: Invalid value: \"\": a lowercase RFC 1123"],
        ),
        (
            "/spec/containers/0/name",
            json!(long),
            &[&format!("spec.containers[0].name: Invalid value: \"{long}\": must be no more than 63 bytes")],
        ),
        ("/spec/containers/0/name", json!(""), &["spec.containers[0].name: Required value"]),
        (
            "/spec/initContainers",
            json!([{"name": "c", "image": "i"}]),
            &["spec.initContainers[0].name: Duplicate value: \"c\""],
        ),
        (
            "/spec/volumes/0/name",
            json!("../v"),
            &["spec.volumes[0].name: Invalid value: \"../v\": a lowercase RFC 1123 label"],
        ),
        (
            "/spec/volumes",
            json!([{"name": "v", "emptyDir": {}}, {"name": "v", "emptyDir": {}}]),
            &["spec.volumes[1].name: Duplicate value: \"v\""],
        ),
        (
            "/spec/hostAliases",
            json!([{"ip": "1.2.3"}]),
            &["spec.hostAliases[0].ip: Invalid value: \"1.2.3\": must be a valid IP"],
        ),
    ]);
    of_container(&[
        ("/env", json!([{"name": ""}]), &["spec.containers[0].env[0].name: Required value"]),
        (
            "/env",
            json!([{"name": "a=b"}]),
            &["spec.containers[0].env[0].name: Invalid value: \"a=b\": a valid environment"],
        ),
        (
            "/env",
            json!([{"name": "A", "valueFrom": {"secretKeyRef": {"name": "../s", "key": ".."}}}]),
            &[
                "spec.containers[0].env[0].valueFrom.secretKeyRef.name: Invalid value: \"../s\": a lowercase",
                "spec.containers[0].env[0].valueFrom.secretKeyRef.key: Invalid value: \"..\": must not be '..'",
            ],
        ),
        (
            "/envFrom",
            json!([{"configMapRef": {"name": ""}}]),
            &["spec.containers[0].envFrom[0].configMapRef.name: Required value"],
        ),
        (
            "/image",
            json!(" i"),
            &[
                "spec.containers[0].image: Invalid value: \" i\": must not have leading or trailing whitespace",
            ],
        ),
    ]);
}

#[test]
fn enum_fields_accept_only_the_values_of_the_api() {
    assert_errors(&[
        (
            "/spec/restartPolicy",
            json!("Sideways"),
            &[
                "spec.restartPolicy: Unsupported value: \"Sideways\": supported values: \"Always\", \"OnFailure\", \"Never\"",
            ],
        ),
        ("/spec/dnsPolicy", json!("x"), &["spec.dnsPolicy: Unsupported value: \"x\": supported values: "]),
        ("/spec/preemptionPolicy", json!(""), &["spec.preemptionPolicy: Unsupported value: \"\""]),
        (
            "/spec/os",
            json!({"name": "plan9"}),
            &["spec.os: Unsupported value: \"plan9\": supported values: \"linux\", \"windows\""],
        ),
        (
            "/spec/tolerations",
            json!([{"key": "a", "operator": "Sideways"}]),
            &["spec.tolerations[0].operator: Unsupported value"],
        ),
        (
            "/spec/tolerations",
            json!([{"key": "a", "effect": "x"}]),
            &["spec.tolerations[0].effect: Unsupported value: \"x\""],
        ),
        (
            "/spec/tolerations",
            json!([{"value": "a"}]),
            &["spec.tolerations[0].operator: Invalid value: \"\": operator must be Exists"],
        ),
        (
            "/spec/securityContext",
            json!({"fsGroupChangePolicy": "x", "supplementalGroupsPolicy": "y", "seLinuxChangePolicy": "z"}),
            &[
                "spec.securityContext.fsGroupChangePolicy: Unsupported value: \"x\": supported values: \"Always\", \"OnRootMismatch\"",
                "spec.securityContext.supplementalGroupsPolicy: Unsupported value: \"y\"",
                "spec.securityContext.seLinuxChangePolicy: Unsupported value: \"z\"",
            ],
        ),
        (
            "/spec/topologySpreadConstraints",
            json!([{"maxSkew": 0, "topologyKey": "", "whenUnsatisfiable": "x"}]),
            &[
                "spec.topologySpreadConstraints[0].maxSkew: Invalid value: 0: must be greater than zero",
                "spec.topologySpreadConstraints[0].topologyKey: Required value: can not be empty",
                "spec.topologySpreadConstraints[0].whenUnsatisfiable: Unsupported value: \"x\"",
            ],
        ),
        (
            "/spec/affinity",
            json!({"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 0, "podAffinityTerm": {"topologyKey": "a b", "labelSelector": {"matchExpressions": [{"key": "k", "operator": "Near"}]}}},
            ]}}),
            &[
                "spec.affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight: Invalid value: 0: must be in the range 1-100",
                "spec.affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].podAffinityTerm.labelSelector.matchExpressions[0].operator: Invalid value: \"Near\": not a valid selector operator",
                "spec.affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].podAffinityTerm.topologyKey: Invalid value: \"a b\": name part must consist",
            ],
        ),
        (
            "/spec/affinity",
            json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}),
            &[
                "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms: Required value: must have at least one",
            ],
        ),
        (
            "/spec/schedulingGates",
            json!([{"name": "a"}]),
            &["spec.nodeName: Forbidden: cannot be set until all schedulingGates"],
        ),
    ]);
    of_container(&[
        ("/imagePullPolicy", json!("x"), &["spec.containers[0].imagePullPolicy: Unsupported value: \"x\""]),
        ("/restartPolicy", json!(""), &["spec.containers[0].restartPolicy: Unsupported value: \"\""]),
        (
            "/restartPolicyRules",
            json!([{"action": "Stop", "exitCodes": {"operator": "Near", "values": []}}]),
            &[
                "spec.containers[0].restartPolicy: Required value: must specify restartPolicy when restart rules are used",
                "spec.containers[0].restartPolicyRules[0].action: Unsupported value: \"Stop\"",
                "spec.containers[0].restartPolicyRules[0].exitCodes.operator: Unsupported value: \"Near\": supported values: \"In\", \"NotIn\"",
            ],
        ),
        (
            "/terminationMessagePolicy",
            json!("x"),
            &["spec.containers[0].terminationMessagePolicy: Unsupported value: \"x\""],
        ),
        (
            "/resizePolicy",
            json!([{"resourceName": "gpu", "restartPolicy": "x"}]),
            &[
                "spec.containers[0].resizePolicy: Unsupported value: \"gpu\": supported values: \"cpu\", \"memory\"",
                "spec.containers[0].resizePolicy: Unsupported value: \"x\"",
            ],
        ),
        (
            "/volumeMounts",
            json!([{"name": "v", "mountPath": "/v", "mountPropagation": "x", "recursiveReadOnly": "y"}]),
            &[
                "spec.containers[0].volumeMounts[0].mountPropagation: Unsupported value: \"x\"",
                "spec.containers[0].volumeMounts[0].recursiveReadOnly: Unsupported value: \"y\"",
            ],
        ),
        (
            "/env",
            json!([{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.x"}}}]),
            &["spec.containers[0].env[0].valueFrom.fieldRef.fieldPath: Unsupported value: \"spec.x\""],
        ),
        (
            "/env",
            json!([{"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.gpu"}}}]),
            &[
                "spec.containers[0].env[0].valueFrom.resourceFieldRef.resource: Unsupported value: \"limits.gpu\"",
            ],
        ),
        (
            "/env",
            json!([{"name": "A", "valueFrom": {}}]),
            &["spec.containers[0].env[0].valueFrom: Invalid value: \"\": must specify one of"],
        ),
    ]);
}

#[test]
fn security_contexts_have_ids_and_profiles_that_exist() {
    const RANGE: &str = "must be between 0 and 2147483647, inclusive";
    assert_errors(&[
        (
            "/spec/securityContext",
            json!({"runAsUser": -1, "runAsGroup": 2_147_483_648_i64, "fsGroup": i64::MIN, "supplementalGroups": [0, -1]}),
            &[
                &format!("spec.securityContext.fsGroup: Invalid value: {}: {RANGE}", i64::MIN),
                &format!("spec.securityContext.runAsUser: Invalid value: -1: {RANGE}"),
                &format!("spec.securityContext.runAsGroup: Invalid value: 2147483648: {RANGE}"),
                &format!("spec.securityContext.supplementalGroups[1]: Invalid value: -1: {RANGE}"),
            ],
        ),
        (
            "/spec/securityContext",
            json!({"sysctls": [{"name": "../x", "value": ""}, {"name": "a.b", "value": ""}, {"name": "a.b", "value": ""}]}),
            &[
                "spec.securityContext.sysctls[0].name: Invalid value: \"../x\": must have at most 253 characters",
                "spec.securityContext.sysctls[2].name: Duplicate value: \"a.b\"",
            ],
        ),
        (
            "/spec/securityContext",
            json!({"windowsOptions": {"hostProcess": true}}),
            &[
                "spec.hostNetwork: Invalid value: false: hostNetwork must be true if pod contains any hostProcess containers",
            ],
        ),
        (
            "/spec/securityContext",
            json!({"windowsOptions": {"runAsUserName": "a\\b\\c", "gmsaCredentialSpec": ""}}),
            &[
                "spec.securityContext.windowsOptions.gmsaCredentialSpec: Invalid value: \"\": gmsaCredentialSpec cannot be",
                "spec.securityContext.windowsOptions.runAsUserName: Invalid value: \"a\\\\b\\\\c\": runAsUserName cannot contain more",
            ],
        ),
    ]);
    of_container(&[
        (
            "/securityContext",
            json!({"runAsUser": -1}),
            &[&format!("spec.containers[0].securityContext.runAsUser: Invalid value: -1: {RANGE}")],
        ),
        (
            "/securityContext",
            json!({"procMount": "x"}),
            &["spec.containers[0].securityContext.procMount: Unsupported value: \"x\""],
        ),
        (
            "/securityContext",
            json!({"procMount": "Unmasked"}),
            &["spec.containers[0].securityContext.procMount: Invalid value: \"Unmasked\": `hostUsers`"],
        ),
        (
            "/securityContext",
            json!({"seccompProfile": {"type": "Localhost", "localhostProfile": "../x"}}),
            &[
                "spec.containers[0].securityContext.seccompProfile.localhostProfile: Invalid value: \"../x\": must not contain '..'",
            ],
        ),
        (
            "/securityContext",
            json!({"seccompProfile": {"type": "RuntimeDefault", "localhostProfile": "x"}}),
            &[
                "spec.containers[0].securityContext.seccompProfile.localhostProfile: Invalid value: \"x\": can only be set when",
            ],
        ),
        (
            "/securityContext",
            json!({"appArmorProfile": {"type": "Sideways"}}),
            &["spec.containers[0].securityContext.appArmorProfile.type: Unsupported value: \"Sideways\""],
        ),
        (
            "/securityContext",
            json!({"appArmorProfile": {"type": "Localhost"}}),
            &[
                "spec.containers[0].securityContext.appArmorProfile.localhostProfile: Required value: must be set when",
            ],
        ),
        (
            "/securityContext",
            json!({"allowPrivilegeEscalation": false, "privileged": true}),
            &[
                "spec.containers[0].securityContext: Invalid value: true: cannot set `allowPrivilegeEscalation` to false",
            ],
        ),
    ]);
}

#[test]
fn resource_lists_accept_only_valid_quantities_of_known_resources() {
    let no_quantity = "quantities must match the regular expression";
    of_container(&[
        (
            "/resources",
            json!({"limits": {"cpu": "many"}}),
            &[
                &format!("spec.containers[0].resources.limits[cpu]: Invalid value: \"many\": {no_quantity}"),
                &format!(
                    "spec.containers[0].resources.requests[cpu]: Invalid value: \"many\": {no_quantity}"
                ),
            ],
        ),
        (
            "/resources",
            json!({"requests": {"memory": "-1"}}),
            &[
                "spec.containers[0].resources.requests[memory]: Invalid value: \"-1\": must be greater than or equal to 0",
            ],
        ),
        (
            "/resources",
            json!({"requests": {"x": "1"}}),
            &[
                "spec.containers[0].resources.requests[x]: Invalid value: \"x\": must be a standard resource for containers",
            ],
        ),
        (
            "/resources",
            json!({"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}),
            &[
                "spec.containers[0].resources.requests: Invalid value: \"2\": must be less than or equal to cpu limit of 1",
            ],
        ),
        (
            "/resources",
            json!({"requests": {"a.b/c": "1"}}),
            &[
                "spec.containers[0].resources.limits: Required value: Limit must be set for non overcommitable resources",
            ],
        ),
        (
            "/resources",
            json!({"limits": {"a.b/c": "1500m", "cpu": "1"}}),
            &[
                "spec.containers[0].resources.limits[a.b/c]: Invalid value: \"1500m\": must be an integer",
                "spec.containers[0].resources.requests[a.b/c]: Invalid value: \"1500m\": must be an integer",
            ],
        ),
        (
            "/resources",
            json!({"limits": {"hugepages-2Mi": "3Mi"}}),
            &[
                "spec.containers[0].resources.limits[hugepages-2Mi]: Invalid value: \"3Mi\": 3Mi is not positive integer multiple of hugepages-2Mi",
                "spec.containers[0].resources.requests[hugepages-2Mi]: Invalid value: \"3Mi\": 3Mi is not positive",
                "spec.containers[0].resources: Forbidden: HugePages require cpu or memory",
            ],
        ),
        (
            "/resources",
            json!({"claims": [{"name": "x"}]}),
            &[
                "spec.containers[0].resources.claims[0]: Not found: \"x\": must be one of the names in pod.spec.resourceClaims which is empty",
            ],
        ),
        (
            "/env",
            json!([{"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "2"}}}]),
            &[
                "spec.containers[0].env[0].valueFrom.resourceFieldRef.divisor: Invalid value: \"limits.cpu\": only divisor's values 1m and 1",
            ],
        ),
    ]);
    assert_errors(&[
        (
            "/spec/overhead",
            json!({"cpu": ""}),
            &[&format!("spec.overhead.limits[cpu]: Invalid value: \"\": {no_quantity}")],
        ),
        (
            "/spec/volumes/0/emptyDir",
            json!({"sizeLimit": "-1"}),
            &[
                "spec.volumes[0].emptyDir.sizeLimit: Forbidden: SizeLimit field must be a valid resource quantity",
            ],
        ),
        (
            "/spec/resources",
            json!({"limits": {"ephemeral-storage": "1"}}),
            &[
                "spec.resources.limits[ephemeral-storage]: Unsupported value: \"ephemeral-storage\"",
                "spec.resources.requests[ephemeral-storage]: Unsupported value",
            ],
        ),
        (
            "/spec/activeDeadlineSeconds",
            json!(0),
            &["spec.activeDeadlineSeconds: Invalid value: 0: must be between 1 and 2147483647"],
        ),
    ]);
    let mut pod = with("/spec/resources", json!({"requests": {"cpu": "1"}, "limits": {"cpu": "1"}}));
    pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "2"}, "limits": {"cpu": "2"}});
    assert_eq!(
        errors(pod),
        [
            "spec.resources.requests[cpu]: Invalid value: \"1\": must be greater than or equal to aggregate container requests of 2",
            "spec.resources.containers[0][cpu].limits: Invalid value: \"2\": must be less than or equal to pod limits of 1",
        ]
    );
}

#[test]
fn volumes_and_mounts_are_complete_and_stay_inside() {
    let at = "spec.volumes[0]";
    let sources: &[(Value, &[&str])] = &[
        (json!({}), &[]),
        (
            json!({"emptyDir": {}, "hostPath": {"path": "/"}}),
            &[".hostPath: Forbidden: may not specify more than 1 volume type"],
        ),
        (
            json!({"hostPath": {"path": "a/../b"}}),
            &[".hostPath.path: Invalid value: \"a/../b\": must not contain '..'"],
        ),
        (json!({"hostPath": {"path": "/", "type": "x"}}), &[".hostPath.type: Unsupported value: \"x\""]),
        (
            json!({"configMap": {"name": "", "defaultMode": 512, "items": [{"key": "", "path": "../x", "mode": -1}]}}),
            &[
                ".configMap.name: Required value",
                ".configMap.defaultMode: Invalid value: 512: must be a number between 0 and 0777 (octal), both inclusive",
                ".configMap.items[0].key: Required value",
                ".configMap.items[0].path: Invalid value: \"../x\": must not contain '..'",
                ".configMap.items[0].mode: Invalid value: -1: must be a number",
            ],
        ),
        (json!({"secret": {}}), &[".secret.secretName: Required value"]),
        (json!({"emptyDir": {"mode": 0o1777}}), &[]),
        (
            json!({"emptyDir": {"mode": 0o2000}}),
            &[
                ".emptyDir.mode: Invalid value: 1024: must be a number between 0 and 01777 (octal), both inclusive",
            ],
        ),
        (
            json!({"secret": {"secretName": "s", "defaultUser": -1, "items": [{"key": "k", "path": "p", "user": 1_i64 << 31}]}}),
            &[
                ".secret.defaultUser: Invalid value: -1: must be between 0 and 2147483647",
                ".secret.items[0].user: Invalid value: 2147483648: must be between 0 and 2147483647",
            ],
        ),
        (
            json!({"downwardAPI": {"defaultUser": -2, "items": [
                {"path": "x", "fieldRef": {"fieldPath": "metadata.name"}, "user": -3}]}}),
            &[".downwardAPI.defaultUser: Invalid value: -2", ".downwardAPI.user: Invalid value: -3"],
        ),
        (
            json!({"projected": {"defaultUser": -4, "sources": [{"serviceAccountToken": {"path": "t", "user": -5}}]}}),
            &[
                ".projected: static pods may not reference serviceaccounts",
                ".projected.defaultUser: Invalid value: -4",
                ".projected.sources[0].serviceAccountToken.user: Invalid value: -5",
            ],
        ),
        (
            json!({"downwardAPI": {"items": [{"path": "/x"}]}}),
            &[
                ".downwardAPI.path: Invalid value: \"/x\": must be a relative path",
                ".downwardAPI: Required value: one of fieldRef and resourceFieldRef is required",
            ],
        ),
        (
            json!({"downwardAPI": {"items": [{"path": "x", "resourceFieldRef": {"resource": "limits.cpu"}}]}}),
            &[".downwardAPI.resourceFieldRef.containerName: Required value"],
        ),
        (
            json!({"projected": {"sources": [
                {"secret": {"name": "s", "items": [{"key": "k", "path": "p"}]}, "downwardAPI": {}},
                {"configMap": {"name": "c", "items": [{"key": "k", "path": "p"}]}},
            ]}}),
            &[
                ".projected.sources[0]: Forbidden: may not specify more than 1 volume type per source",
                ".projected: Invalid value: \"c\": conflicting duplicate paths",
            ],
        ),
        (json!({"image": {"reference": ""}}), &[".image.reference: Required value"]),
        (
            json!({"nfs": {"server": "s", "path": "x"}}),
            &[".nfs.path: Invalid value: \"x\": must be an absolute path"],
        ),
        (
            json!({"iscsi": {"targetPortal": "p", "iqn": "x", "lun": 256}}),
            &[
                ".iscsi.iqn: Invalid value: \"x\": must be valid format starting with iqn, eui, or naa",
                ".iscsi.lun: Invalid value: 256: must be between 0 and 255, inclusive",
            ],
        ),
        (
            json!({"fc": {}}),
            &[".fc.targetWWNs: Required value: must specify either targetWWNs or wwids, but not both"],
        ),
        (
            json!({"flexVolume": {"driver": "d", "options": {"a.k8s.io/b": "c"}}}),
            &[
                ".flexVolume.options[a.k8s.io/b]: Invalid value: \"a.k8s.io/b\": kubernetes.io and k8s.io namespaces are reserved",
            ],
        ),
        (
            json!({"quobyte": {"registry": "a:1,b", "volume": "v"}}),
            &[".quobyte.registry: Invalid value: \"a:1,b\": must be a host:port"],
        ),
        (
            json!({"azureDisk": {"diskName": "d", "diskURI": "x"}}),
            &[".azureDisk.diskURI: Unsupported value: \"x\""],
        ),
    ];
    for (source, want) in sources {
        let mut volume = json!({"name": "v"});
        volume.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
        let want: Vec<String> = want.iter().map(|w| format!("{at}{w}")).collect();
        let want: Vec<&str> = want.iter().map(String::as_str).collect();
        assert_errors(&[("/spec/volumes", json!([volume]), &want)]);
    }
    let at = "spec.containers[0].volumeMounts";
    of_container(&[
        (
            "/volumeMounts",
            json!([{"name": "v", "mountPath": "/v", "bindMountOptions": ["noexec", "nodev", "nosuid"]}]),
            &[],
        ),
        (
            "/volumeMounts",
            json!([{"name": "v", "mountPath": "/v", "bindMountOptions": ["exec", "nodev", "nodev"]}]),
            &[
                &format!(
                    "{at}[0].bindMountOptions[0]: Unsupported value: \"exec\": supported values: \"noexec\", \"nodev\", \"nosuid\""
                ),
                &format!("{at}[0].bindMountOptions[2]: Duplicate value: \"nodev\""),
            ],
        ),
        (
            "/volumeMounts",
            json!([{"name": "w", "mountPath": ""}]),
            &[&format!("{at}[0].name: Not found: \"w\""), &format!("{at}[0].mountPath: Required value")],
        ),
        (
            "/volumeMounts",
            json!([{"name": "v", "mountPath": "/v"}, {"name": "v", "mountPath": "/v"}]),
            &[&format!("{at}[1].mountPath: Invalid value: \"/v\": must be unique")],
        ),
        (
            "/volumeMounts",
            json!([{"name": "v", "mountPath": "/v", "subPath": "a/../b", "subPathExpr": "/x"}]),
            &[
                &format!("{at}[0].subPath: Invalid value: \"a/../b\": must not contain '..'"),
                &format!("{at}[0].subPathExpr: Invalid value: \"/x\": must be a relative path"),
                &format!(
                    "{at}[0].subPathExpr: Invalid value: \"/x\": subPathExpr and subPath are mutually exclusive"
                ),
            ],
        ),
        (
            "/volumeMounts",
            json!([{"name": "v", "mountPath": "/v", "mountPropagation": "Bidirectional"}]),
            &[&format!(
                "{at}[0].mountPropagation: Forbidden: Bidirectional mount propagation is available only to privileged"
            )],
        ),
        (
            "/volumeMounts",
            json!([{"name": "v", "mountPath": "/v", "recursiveReadOnly": "Enabled"}]),
            &[&format!("{at}[0].recursiveReadOnly: Forbidden: may only be specified when readOnly is true")],
        ),
        (
            "/volumeDevices",
            json!([{"name": "v", "devicePath": "/dev/../x"}]),
            &[
                "spec.containers[0].volumeDevices[0].name: Invalid value: \"v\": can only use volume source type",
                "spec.containers[0].volumeDevices[0].devicePath: Invalid value: \"/dev/../x\": can not contain backsteps",
            ],
        ),
        (
            "/env",
            json!([{"name": "A", "valueFrom": {"fileKeyRef": {"key": "K", "path": "/p", "volumeName": "w"}}}]),
            &[
                "spec.containers[0].env[0].valueFrom.fileKeyRef.path: Invalid value: \"/p\": must be a relative path",
                "spec.containers[0].env[0].valueFrom.fileKeyRef.volumeName: Not found: \"w\"",
            ],
        ),
    ]);
}

#[test]
fn a_static_pod_may_not_refer_to_api_objects() {
    for (source, want) in [
        (json!({"persistentVolumeClaim": {"claimName": "x"}}), "persistentvolumeclaims"),
        (json!({"ephemeral": {}}), "persistentvolumeclaims (via ephemeral volumes)"),
        (json!({"csi": {"driver": "x"}}), "csidrivers (via CSI volumes)"),
        (json!({"glusterfs": {"endpoints": "x", "path": "y"}}), "endpoints (via glusterFS volumes)"),
        (json!({"azureFile": {"secretName": "x", "shareName": "y"}}), "secrets (via azureFile volumes)"),
        (
            json!({"projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}),
            "serviceaccounts (via projected volumes)",
        ),
        (json!({"projected": {"sources": [{"clusterTrustBundle": {"path": "t"}}]}}), "clustertrustbundles"),
        (
            json!({"projected": {"sources": [{"podCertificate": {"keyType": "k", "signerName": "s"}}]}}),
            "podcertificates",
        ),
    ] {
        let mut volume = json!({"name": "v"});
        volume.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
        let got = errors(with("/spec/volumes", json!([volume])));
        assert!(
            got.iter().any(|e| e.ends_with(&format!(": static pods may not reference {want}"))),
            "{want}: {got:?}"
        );
    }
    assert_errors(&[
        (
            "/spec/resourceClaims",
            json!([{"name": "r"}]),
            &["spec.resourceClaims: static pods may not reference resourceclaims"],
        ),
        (
            "/spec/serviceAccountName",
            json!("x"),
            &["spec.serviceAccountName: static pods may not reference serviceaccounts"],
        ),
        (
            "/spec/ephemeralContainers",
            json!([{"name": "e"}]),
            &["spec.ephemeralContainers: Forbidden: cannot be set on create"],
        ),
        (
            "/spec/volumes",
            json!([{"name": "v", "projected": {"sources": [{"downwardAPI": {"items": []}}]}}]),
            &[],
        ),
    ]);
}

#[test]
fn an_error_repeats_at_most_256_characters_and_the_rest_of_many_errors_is_counted() {
    let got = errors(with("/spec/hostname", json!("é".repeat(1 << 20))));
    assert!(got.iter().all(|e| e.len() < 1000), "{got:?}");
    let variables: Vec<Value> = (0..10_000).map(|_| json!({"name": "="})).collect();
    let got = errors(with("/spec/containers/0/env", json!(variables)));
    assert_eq!((got.len(), got[100].as_str()), (101, "spec: 9900 more errors"));
}
