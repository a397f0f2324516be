use k8s_openapi::api::core::v1::Node;
use quintlet_model::qos::ResourceList;
use quintlet_model::quantity::Quantity;
use quintlet_testkit::pods::pod_json;
use serde_json::{Value, json};

use super::*;

fn node() -> Node {
    serde_json::from_value(
        json!({"metadata": {"name": "n1", "labels": {"kubernetes.io/os": "linux", "zone": "a", "size": "4"}},
        "spec": {}}),
    )
    .unwrap()
}

fn allocatable() -> ResourceList {
    [("cpu", "2"), ("memory", "1Gi"), ("ephemeral-storage", "10Gi"), ("pods", "3"), ("example.com/gpu", "1")]
        .into_iter()
        .map(|(k, v)| (k.to_owned(), Quantity::parse(v).unwrap()))
        .collect()
}

fn view<'a>(node: Option<&'a Node>, allocatable: &'a ResourceList) -> NodeView<'a> {
    NodeView {
        node,
        allocatable,
        pressure: &[],
        allowed_sysctls: &[],
        kernel: (6, 1),
        strict_supplemental_groups: false,
        app_armor: false,
        declared: &[],
        shutting_down: false,
    }
}

fn requesting(resources: Value) -> Pod {
    pod_json(json!({"containers": [{"name": "c", "image": "i", "resources": {"requests": resources}}]}))
}

fn plain() -> Pod {
    requesting(json!({}))
}

fn with(edit: impl FnOnce(&mut Value)) -> Pod {
    let mut spec = json!({"containers": [{"name": "c", "image": "i"}]});
    edit(&mut spec);
    pod_json(spec)
}

fn reason(verdict: &AdmitResult) -> &str {
    match verdict {
        AdmitResult::Admit => "",
        AdmitResult::Reject(r) => &r.reason,
        AdmitResult::Preempt(_) => "make room",
    }
}

fn message(verdict: &AdmitResult) -> &str {
    match verdict {
        AdmitResult::Reject(r) => &r.message,
        AdmitResult::Admit | AdmitResult::Preempt(_) => "",
    }
}

#[test]
fn a_pod_must_fit_beside_the_others() {
    let (n, a) = (node(), allocatable());
    let v = view(Some(&n), &a);
    let one = requesting(json!({"cpu": "1500m", "memory": "512Mi", "example.com/gpu": "1"}));
    for (name, pod, others, want) in [
        ("empty node", requesting(json!({"cpu": "2", "memory": "1Gi"})), vec![], ""),
        ("cpu", requesting(json!({"cpu": "501m"})), vec![&one], "OutOfcpu"),
        ("cpu just fits", requesting(json!({"cpu": "500m"})), vec![&one], ""),
        ("memory", requesting(json!({"memory": "513Mi"})), vec![&one], "OutOfmemory"),
        ("storage", requesting(json!({"ephemeral-storage": "11Gi"})), vec![], "OutOfephemeral-storage"),
        ("extended", requesting(json!({"example.com/gpu": "1"})), vec![&one], "OutOfexample.com/gpu"),
        ("unknown to the node", requesting(json!({"example.com/other": "1"})), vec![], ""),
        ("pods", plain(), vec![&one, &one, &one], "OutOfpods"),
        ("nothing asked for on a full node", plain(), vec![&one, &one], ""),
    ] {
        assert_eq!(reason(&admit(&pod, &others, &v)), want, "{name}");
    }
    assert_eq!(
        message(&admit(&requesting(json!({"cpu": "501m"})), &[&one], &v)),
        "Node didn't have enough resource: cpu, requested: 501, used: 1500, capacity: 2000"
    );
}

#[test]
fn a_critical_pod_preempts_others_unless_it_is_rejected_for_another_reason() {
    let (n, a) = (node(), allocatable());
    let v = view(Some(&n), &a);
    let mut p = requesting(json!({"cpu": "3"}));
    p.spec.as_mut().unwrap().priority = Some(2_000_000_000);
    let AdmitResult::Preempt(short) = admit(&p, &[], &v) else { panic!("room is made") };
    assert_eq!((short[0].resource.as_str(), short[0].shortfall()), ("cpu", 1000));
    p.spec.as_mut().unwrap().node_name = Some("other".into());
    assert_eq!(reason(&admit(&p, &[], &v)), "NodeName");
}

#[test]
fn extended_resources_and_huge_pages_in_the_status_of_the_node_are_counted() {
    let (mut n, a) = (node(), allocatable());
    n.status.get_or_insert_default().allocatable = Some(
        serde_json::from_value(json!({
            "example.com/dongle": "2", "hugepages-2Mi": "4Mi", "storage.kubernetes.io/native": "1", "cpu": "1m",
            "example.com/gpu": "0",
        }))
        .unwrap(),
    );
    let v = view(Some(&n), &a);
    let two = requesting(json!({"example.com/dongle": "2"}));
    for (wanted, others, want) in [
        (json!({"example.com/dongle": "2"}), vec![], ""),
        (json!({"example.com/dongle": "3"}), vec![], "OutOfexample.com/dongle"),
        (json!({"example.com/dongle": "1"}), vec![&two], "OutOfexample.com/dongle"),
        (json!({"hugepages-2Mi": "6Mi"}), vec![], "OutOfhugepages-2Mi"),
        (json!({"storage.kubernetes.io/native": "2"}), vec![], ""),
        (json!({"example.com/unknown": "1"}), vec![], ""),
        // Measured by this node itself.
        (json!({"cpu": "1", "example.com/gpu": "1"}), vec![], ""),
    ] {
        assert_eq!(reason(&admit(&requesting(wanted.clone()), &others, &v)), want, "{wanted}");
    }
}

#[test]
fn requests_of_the_pod_level_replace_those_of_containers() {
    let (n, a) = (node(), allocatable());
    let v = view(Some(&n), &a);
    let pod = |own: &str, container: &str| {
        let container = json!({"name": "c", "image": "i", "resources": {"requests": {"cpu": container}}});
        pod_json(json!({"resources": {"requests": {"cpu": own}}, "containers": [container]}))
    };
    let one = pod("1500m", "100m");
    assert_eq!(reason(&admit(&pod("500m", "10m"), &[&one], &v)), "");
    assert_eq!(reason(&admit(&pod("501m", "10m"), &[&one], &v)), "OutOfcpu");
    let mut critical = pod("700m", "10m");
    critical.spec.as_mut().unwrap().priority = Some(2_000_000_000);
    let AdmitResult::Preempt(short) = admit(&critical, &[&one], &v) else { panic!("room is made") };
    assert_eq!((short[0].resource.as_str(), short[0].shortfall()), ("cpu", 200));
    let small = pod("100m", "90m");
    let victims = crate::preempt::pods_to_preempt(&critical, &[&small, &one], &short).unwrap();
    assert_eq!(victims, [&one], "the request of the other container would suffice for less");
}

#[test]
fn selector_and_affinity_must_match_the_nodes_labels() {
    let (n, a) = (node(), allocatable());
    let v = view(Some(&n), &a);
    let affinity = |terms: Value| {
        with(|s| {
            s["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] =
                json!({"nodeSelectorTerms": terms});
        })
    };
    let e = |key: &str, operator: &str, values: &[&str]| json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
    for (name, pod, admitted) in [
        ("selector", with(|s| s["nodeSelector"] = json!({"zone": "a"})), true),
        ("other value", with(|s| s["nodeSelector"] = json!({"zone": "b"})), false),
        ("missing label", with(|s| s["nodeSelector"] = json!({"x": ""})), false),
        ("In", affinity(json!([e("zone", "In", &["a", "b"])])), true),
        ("not In", affinity(json!([e("zone", "In", &["b"])])), false),
        ("NotIn", affinity(json!([e("zone", "NotIn", &["b"])])), true),
        ("NotIn without the label", affinity(json!([e("x", "NotIn", &["b"])])), true),
        ("Exists", affinity(json!([e("zone", "Exists", &[])])), true),
        ("DoesNotExist", affinity(json!([e("zone", "DoesNotExist", &[])])), false),
        ("Gt", affinity(json!([e("size", "Gt", &["3"])])), true),
        ("Lt", affinity(json!([e("size", "Lt", &["4"])])), false),
        ("Gt of text", affinity(json!([e("zone", "Gt", &["3"])])), false),
        ("any term", affinity(json!([e("zone", "In", &["b"]), e("zone", "In", &["a"])])), true),
        ("empty term", affinity(json!([{}])), false),
        (
            "field",
            affinity(
                json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]),
            ),
            true,
        ),
        (
            "other field",
            affinity(
                json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}]),
            ),
            false,
        ),
    ] {
        let want = if admitted { "" } else { "NodeAffinity" };
        assert_eq!(reason(&admit(&pod, &[], &v)), want, "{name}");
    }
}

#[test]
fn a_host_port_is_assigned_only_once() {
    let (n, a) = (node(), allocatable());
    let v = view(Some(&n), &a);
    let port = |p: Value| with(|s| s["containers"][0]["ports"] = json!([p]));
    let taken = port(json!({"containerPort": 80, "hostPort": 80}));
    let on_one = port(json!({"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.1"}));
    for (name, pod, other, want) in [
        ("same", port(json!({"containerPort": 8080, "hostPort": 80})), &taken, "NodePorts"),
        ("no host port", port(json!({"containerPort": 80})), &taken, ""),
        ("other protocol", port(json!({"containerPort": 80, "hostPort": 80, "protocol": "UDP"})), &taken, ""),
        (
            "one address of all",
            port(json!({"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.2"})),
            &taken,
            "NodePorts",
        ),
        (
            "another address",
            port(json!({"containerPort": 80, "hostPort": 80, "hostIP": "10.0.0.2"})),
            &on_one,
            "",
        ),
    ] {
        assert_eq!(reason(&admit(&pod, &[other], &v)), want, "{name}");
    }
}

#[test]
fn only_untolerated_no_execute_taints_refuse_and_never_a_static_pod() {
    let a = allocatable();
    let mut n = node();
    let taint = |effect: &str| Taint {
        key: "k".into(),
        value: Some("v".into()),
        effect: effect.into(),
        time_added: None,
    };
    n.spec.as_mut().unwrap().taints = Some(vec![taint("NoSchedule")]);
    assert_eq!(reason(&admit(&plain(), &[], &view(Some(&n), &a))), "");
    n.spec.as_mut().unwrap().taints = Some(vec![taint("NoExecute")]);
    let v = view(Some(&n), &a);
    let tolerating = |t: Value| with(|s| s["tolerations"] = json!([t]));
    for (name, pod, want) in [
        ("none", plain(), "TaintToleration"),
        ("all", tolerating(json!({"operator": "Exists"})), ""),
        ("key", tolerating(json!({"key": "k", "operator": "Exists", "effect": "NoExecute"})), ""),
        ("value", tolerating(json!({"key": "k", "value": "v"})), ""),
        ("other value", tolerating(json!({"key": "k", "value": "w"})), "TaintToleration"),
        (
            "other effect",
            tolerating(json!({"key": "k", "operator": "Exists", "effect": "NoSchedule"})),
            "TaintToleration",
        ),
        (
            "unknown operator",
            tolerating(json!({"key": "k", "operator": "Gt", "value": "v"})),
            "TaintToleration",
        ),
    ] {
        assert_eq!(reason(&admit(&pod, &[], &v)), want, "{name}");
    }
    let mut p = plain();
    p.metadata.annotations = Some([("kubernetes.io/config.source".to_owned(), "file".to_owned())].into());
    assert_eq!(admit(&p, &[], &v), AdmitResult::Admit);
}

#[test]
fn the_os_must_be_the_nodes() {
    let (n, a) = (node(), allocatable());
    let v = view(Some(&n), &a);
    assert_eq!(reason(&admit(&with(|s| s["os"] = json!({"name": "windows"})), &[], &v)), "PodOSNotSupported");
    assert_eq!(reason(&admit(&with(|s| s["os"] = json!({"name": "linux"})), &[], &v)), "");
    let mut p = plain();
    p.metadata.labels = Some([("kubernetes.io/os".to_owned(), "windows".to_owned())].into());
    assert_eq!(reason(&admit(&p, &[], &v)), "PodOSSelectorNodeLabelDoesNotMatch");
    assert_eq!(reason(&admit(&plain(), &[], &view(None, &a))), "InvalidNodeInfo");
}

#[test]
fn features_that_the_runtime_lacks_are_rejected() {
    let (n, a) = (node(), allocatable());
    let strict = with(|s| s["securityContext"] = json!({"supplementalGroupsPolicy": "Strict"}));
    assert_eq!(reason(&admit(&strict, &[], &view(Some(&n), &a))), "SupplementalGroupsPolicyNotSupported");
    let v = NodeView { strict_supplemental_groups: true, ..view(Some(&n), &a) };
    assert_eq!(admit(&strict, &[], &v), AdmitResult::Admit);
    let v = NodeView { shutting_down: true, ..view(Some(&n), &a) };
    assert_eq!(reason(&admit(&plain(), &[], &v)), "NodeShutdown");
}

#[test]
fn under_pressure_only_some_pods_are_taken() {
    let (n, a) = (node(), allocatable());
    let burstable = requesting(json!({"cpu": "1m"}));
    let tolerant = with(|s| {
        s["tolerations"] = json!([{"key": "node.kubernetes.io/memory-pressure", "operator": "Exists", "effect": "NoSchedule"}]);
    });
    let critical = with(|s| s["priority"] = json!(2_000_000_000));
    let memory: &[PressureCondition] = &[PressureCondition::Memory];
    let disk: &[PressureCondition] = &[PressureCondition::Disk];
    for (name, pod, pressure, want) in [
        ("memory, best effort", plain(), memory, "Evicted"),
        ("memory, burstable", burstable.clone(), memory, ""),
        ("memory, tolerated", tolerant.clone(), memory, ""),
        ("disk, burstable", burstable, disk, "Evicted"),
        ("disk, tolerated", tolerant, disk, "Evicted"),
        ("disk, critical", critical, disk, ""),
    ] {
        let v = NodeView { pressure, ..view(Some(&n), &a) };
        assert_eq!(reason(&admit(&pod, &[], &v)), want, "{name}");
    }
    let v =
        NodeView { pressure: &[PressureCondition::Memory, PressureCondition::Disk], ..view(Some(&n), &a) };
    assert_eq!(message(&admit(&plain(), &[], &v)), "The node had condition: [MemoryPressure DiskPressure]. ");
}

#[test]
fn sysctls_are_safe_allowed_or_refused() {
    let (n, a) = (node(), allocatable());
    let set = |name: &str, more: fn(&mut Value)| {
        with(|s| {
            s["securityContext"] = json!({"sysctls": [{"name": name, "value": "1"}]});
            more(s);
        })
    };
    let allowed = ["kernel.msg*", "net.core.somaxconn", "net.ipv4.conf.eno2/100.*"].map(str::to_owned);
    let v = NodeView { allowed_sysctls: &allowed, kernel: (4, 4), ..view(Some(&n), &a) };
    for (name, pod, want) in [
        ("safe", set("kernel.shm_rmid_forced", |_| {}), ""),
        ("of an interface with a dot", set("net/ipv4/conf/eno2.100/forwarding", |_| {}), ""),
        ("safe, with slashes", set("net/ipv4/tcp_syncookies", |_| {}), ""),
        ("too new for the kernel", set("net.ipv4.tcp_rmem", |_| {}), "SysctlForbidden"),
        ("unsafe", set("kernel.panic", |_| {}), "SysctlForbidden"),
        ("allowed by pattern", set("kernel.msgmax", |_| {}), ""),
        ("allowed by name", set("net.core.somaxconn", |_| {}), ""),
        ("host network", set("net.core.somaxconn", |s| s["hostNetwork"] = json!(true)), "SysctlForbidden"),
        ("host ipc", set("kernel.msgmax", |s| s["hostIPC"] = json!(true)), "SysctlForbidden"),
    ] {
        assert_eq!(reason(&admit(&pod, &[], &v)), want, "{name}");
    }
}

#[test]
fn a_sysctl_is_safe_from_the_kernel_on_that_has_one_per_network_namespace() {
    let (n, a) = (node(), allocatable());
    for (name, before, kernel) in [
        ("net.ipv4.tcp_keepalive_time", (4, 4), (4, 5)),
        ("net.ipv4.tcp_fin_timeout", (4, 5), (4, 6)),
        ("net.ipv4.tcp_notsent_lowat", (4, 5), (4, 6)),
        ("net.ipv4.tcp_slow_start_after_idle", (4, 14), (4, 15)),
        ("net.ipv4.tcp_rmem", (4, 14), (4, 15)),
    ] {
        let pod = with(|s| s["securityContext"] = json!({"sysctls": [{"name": name, "value": "1"}]}));
        let on = |kernel| reason(&admit(&pod, &[], &NodeView { kernel, ..view(Some(&n), &a) })).to_owned();
        assert_eq!((on(before), on(kernel)), ("SysctlForbidden".to_owned(), String::new()), "{name}");
    }
}

#[test]
fn a_security_profile_needs_host_support_only_before_the_pod_runs() {
    let (n, a) = (node(), allocatable());
    let field = |at: &str, profile: Value| {
        with(|s| {
            let holder = if at == "pod" { s } else { &mut s["containers"][0] };
            holder["securityContext"] = json!({"appArmorProfile": profile});
        })
    };
    let annotated = |value: &str| {
        let mut p = plain();
        let key = "container.apparmor.security.beta.kubernetes.io/c".to_owned();
        p.metadata.annotations = Some([(key, value.to_owned())].into());
        p
    };
    let off = "Cannot enforce AppArmor: AppArmor is not enabled on the host";
    let nameless =
        "Cannot enforce AppArmor: localhostProfile must be set if appArmorProfile type is Localhost";
    for (name, pod, app_armor, want) in [
        ("none", plain(), false, ""),
        ("default", field("c", json!({"type": "RuntimeDefault"})), false, off),
        ("of the pod", field("pod", json!({"type": "RuntimeDefault"})), false, off),
        ("annotation", annotated("localhost/x"), false, off),
        ("annotated default", annotated("runtime/default"), false, off),
        ("annotated unconfined", annotated("unconfined"), false, ""),
        ("unconfined", field("c", json!({"type": "Unconfined"})), false, ""),
        ("enabled", field("c", json!({"type": "Localhost", "localhostProfile": "x"})), true, ""),
        ("nameless", field("c", json!({"type": "Localhost", "localhostProfile": " "})), true, nameless),
    ] {
        let v = NodeView { app_armor, ..view(Some(&n), &a) };
        let verdict = admit(&pod, &[], &v);
        assert_eq!(message(&verdict), want, "{name}");
        assert_eq!(reason(&verdict), if want.is_empty() { "" } else { "AppArmor" }, "{name}");
    }
    let mut running = field("c", json!({"type": "RuntimeDefault"}));
    running.status = Some(serde_json::from_value(json!({"phase": "Running"})).unwrap());
    assert_eq!(admit(&running, &[], &view(Some(&n), &a)), AdmitResult::Admit);
}

#[test]
fn no_pod_is_preempted_for_a_critical_pod_that_is_rejected_anyway() {
    let (n, a) = (node(), allocatable());
    let mut p = requesting(json!({"cpu": "3"}));
    p.spec.as_mut().unwrap().priority = Some(2_000_000_000);
    let v = NodeView { shutting_down: true, ..view(Some(&n), &a) };
    assert_eq!(reason(&admit(&p, &[], &v)), "NodeShutdown");
}

#[test]
fn every_refusal_reads_as_the_kubelets() {
    let a = allocatable();
    let mut n = node();
    let labelled = {
        let mut p = plain();
        p.metadata.labels = Some([("kubernetes.io/os".to_owned(), "windows".to_owned())].into());
        p
    };
    let port = with(|s| s["containers"][0]["ports"] = json!([{"containerPort": 1, "hostPort": 80}]));
    for (pod, others, want) in [
        (labelled, vec![], "Failed to admit pod as the `kubernetes.io/os` label doesn't match node label"),
        (
            with(|s| s["os"] = json!({"name": "windows"})),
            vec![],
            "Failed to admit pod as the OS field doesn't match node OS",
        ),
        (
            with(|s| s["securityContext"] = json!({"supplementalGroupsPolicy": "Strict"})),
            vec![],
            "SupplementalGroupsPolicy=Strict is not supported in this node",
        ),
        (
            with(|s| s["nodeSelector"] = json!({"kubernetes.io/arch": "other"})),
            vec![],
            "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector",
        ),
        (
            with(|s| s["nodeName"] = json!("other")),
            vec![],
            "Predicate NodeName failed: node(s) didn't match the requested node name",
        ),
        (
            port.clone(),
            vec![&port],
            "Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports",
        ),
        (
            with(|s| s["securityContext"] = json!({"sysctls": [{"name": "kernel.panic", "value": "1"}]})),
            vec![],
            "forbidden sysctl: \"kernel.panic\" not allowlisted",
        ),
    ] {
        assert_eq!(message(&admit(&pod, &others, &view(Some(&n), &a))), want);
    }
    assert_eq!(message(&admit(&plain(), &[], &view(None, &a))), "Kubelet cannot get node info.");
    let taint = Taint { key: "k".into(), effect: "NoExecute".into(), ..Taint::default() };
    n.spec.as_mut().unwrap().taints = Some(vec![taint]);
    assert_eq!(
        message(&admit(&plain(), &[], &view(Some(&n), &a))),
        "Predicate TaintToleration failed: node(s) had taints that the pod didn't tolerate"
    );
}

#[test]
fn a_pod_that_needs_undeclared_features_is_rejected_with_their_names() {
    let (n, a) = (node(), allocatable());
    let rule = json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [3]}}]);
    let restarts_all = |spec: &mut Value| {
        spec["containers"][0]["restartPolicy"] = json!("Never");
        spec["containers"][0]["restartPolicyRules"] = rule.clone();
    };
    let maps_host = |spec: &mut Value| {
        spec["hostUsers"] = json!(false);
        spec["hostNetwork"] = json!(true);
    };
    let needs = "Pod requires node features that are not available: ";
    let all = "RestartAllContainersOnContainerExits";
    let ids = "UserNamespacesHostNetworkSupport";
    let options = "VolumeBindMountOptions";
    let mounts = |options: &[&str]| json!([{"name": "v", "mountPath": "/v", "bindMountOptions": options}]);
    for (pod, declared, want) in [
        (plain(), &[][..], String::new()),
        (with(restarts_all), &[all][..], String::new()),
        (with(restarts_all), &[][..], format!("{needs}{all}")),
        (with(maps_host), &[all][..], format!("{needs}{ids}")),
        (with(|spec| spec["hostUsers"] = json!(false)), &[][..], String::new()),
        (
            with(|spec| spec["containers"][0]["volumeMounts"] = mounts(&["noexec"])),
            &[all][..],
            format!("{needs}{options}"),
        ),
        (
            with(|spec| spec["containers"][0]["volumeMounts"] = mounts(&["noexec"])),
            &[options][..],
            String::new(),
        ),
        (with(|spec| spec["containers"][0]["volumeMounts"] = mounts(&[])), &[][..], String::new()),
        (
            with(|spec| {
                spec["initContainers"] =
                    json!([{"name": "i", "image": "i", "volumeMounts": mounts(&["nodev"])}]);
            }),
            &[][..],
            format!("{needs}{options}"),
        ),
        (
            with(|spec| {
                spec["ephemeralContainers"] =
                    json!([{"name": "e", "image": "i", "volumeMounts": mounts(&["nosuid"])}]);
            }),
            &[][..],
            format!("{needs}{options}"),
        ),
        (with(|spec| spec["hostNetwork"] = json!(true)), &[][..], String::new()),
        (
            with(|spec| {
                restarts_all(spec);
                maps_host(spec);
            }),
            &[][..],
            format!("{needs}{all}, {ids}"),
        ),
    ] {
        let verdict = admit(&pod, &[], &NodeView { declared, ..view(Some(&n), &a) });
        assert_eq!(message(&verdict), want);
        assert_eq!(reason(&verdict), if want.is_empty() { "" } else { "PodFeatureUnsupported" });
    }
}
