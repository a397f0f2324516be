//! Tables of the claims that pods need.

use quintlet_testkit::pods::pod_json;
use serde_json::{Value, json};

use super::*;

fn pod(spec: Value, status: Value) -> Pod {
    let mut pod = pod_json(spec);
    pod.metadata.namespace = Some("ns".to_owned());
    pod.metadata.name = Some("p".to_owned());
    pod.metadata.uid = Some("uid-p".to_owned());
    pod.status = Some(serde_json::from_value(status).unwrap());
    pod
}

fn with_claims(claims: Value, statuses: Value) -> Pod {
    let containers = json!([{"name": "main", "image": "i"}]);
    pod(
        json!({"containers": containers, "resourceClaims": claims}),
        json!({"resourceClaimStatuses": statuses}),
    )
}

fn needed(pod: &Pod) -> String {
    match needed_claims(pod) {
        Ok(claims) => {
            let name = |claim: &NeededClaim| {
                format!("{}{}", claim.name, if claim.is_of_template { "*" } else { "" })
            };
            claims.iter().map(name).collect::<Vec<_>>().join(" ")
        }
        Err(error) => error.to_string(),
    }
}

#[test]
fn the_claims_of_a_pod_are_named_by_its_spec_or_by_its_status() {
    // Entries, statuses, claims; those of templates with a star.
    let table = [
        (json!([]), json!([]), ""),
        (json!([{"name": "a", "resourceClaimName": "shared"}]), json!([]), "shared"),
        (
            json!([{"name": "b", "resourceClaimTemplateName": "t"}, {"name": "a", "resourceClaimName": "shared"}]),
            json!([{"name": "b", "resourceClaimName": "p-b-x"}]),
            "p-b-x* shared",
        ),
        // No claim is needed.
        (json!([{"name": "b", "resourceClaimTemplateName": "t"}]), json!([{"name": "b"}]), ""),
        (
            json!([{"name": "b", "resourceClaimTemplateName": "t"}]),
            json!([{"name": "other", "resourceClaimName": "x"}]),
            r#"pod "ns/p": ResourceClaim not created yet"#,
        ),
        (
            json!([{"name": "b"}]),
            json!([]),
            r#"pod "ns/p", spec.resourceClaim "b": none of the supported fields are set"#,
        ),
    ];
    for (claims, statuses, expected) in table {
        let pod = with_claims(claims, statuses);
        assert_eq!(needed(&pod), expected);
        assert_eq!(has_claims(&pod), !pods::spec(&pod).resource_claims.as_ref().unwrap().is_empty());
    }
}

fn claim(owner: Value, reserved: Value, allocated: bool) -> ResourceClaim {
    let results = json!([
        {"driver": "a.com", "pool": "n", "device": "d1", "request": "r/sub", "adminAccess": true},
        {"driver": "b.com", "pool": "n", "device": "d1", "request": "s"},
    ]);
    let allocation = if allocated { json!({"devices": {"results": results}}) } else { json!(null) };
    serde_json::from_value(json!({
        "metadata": {"namespace": "ns", "name": "c", "uid": "uid-c", "ownerReferences": owner},
        "spec": {"devices": {}},
        "status": {"reservedFor": reserved, "allocation": allocation},
    }))
    .unwrap()
}

#[test]
fn a_claim_must_be_for_the_pod_reserved_and_allocated() {
    let needed = |is_of_template| NeededClaim { name: "c".to_owned(), is_of_template };
    let owner = |uid: &str, controller: bool| json!([{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": uid, "controller": controller}]);
    let reserved = |uid: &str| json!([{"resource": "pods", "name": "p", "uid": uid}]);
    let not_owned = "ResourceClaim ns/c was not created for Pod ns/p (Pod is not owner)";
    let not_allowed = "pod p (uid-p) is not allowed to use ResourceClaim c (uid-c)";
    // Of a template, owner, reserved for, allocated, error.
    let table = [
        (false, json!([]), reserved("uid-p"), true, ""),
        (true, owner("uid-p", true), reserved("uid-p"), true, ""),
        (true, owner("uid-p", false), reserved("uid-p"), true, not_owned),
        (true, owner("uid-q", true), reserved("uid-p"), true, not_owned),
        (true, json!(null), reserved("uid-p"), true, not_owned),
        (false, json!([]), reserved("uid-q"), true, not_allowed),
        (false, json!([]), json!(null), true, not_allowed),
        (false, json!([]), reserved("uid-p"), false, "ResourceClaim c: not allocated"),
    ];
    let pod = with_claims(json!([]), json!([]));
    for (is_of_template, owner, reserved, is_allocated, error) in table {
        let checked = allocated_claim(&pod, &needed(is_of_template), &claim(owner, reserved, is_allocated));
        match checked {
            Ok(claim) => {
                assert_eq!(error, "");
                assert_eq!(claim.drivers(), ["a.com", "b.com"].into());
                assert_eq!((claim.uid.as_str(), claim.key.to_string().as_str()), ("uid-c", "ns/c"));
                assert_eq!(claim.devices.len(), 2);
            }
            Err(found) => assert_eq!(found.to_string(), error),
        }
    }
    let mut elsewhere = claim(owner("uid-p", true), reserved("uid-p"), true);
    elsewhere.metadata.namespace = Some("other".to_owned());
    let error = allocated_claim(&pod, &needed(true), &elsewhere).unwrap_err();
    assert_eq!(error.to_string(), "ResourceClaim other/c is not in the same namespace as Pod ns/p");
}

#[test]
fn the_pod_group_of_a_pod_may_own_the_claim_and_have_it_reserved() {
    let spec =
        json!({"containers": [{"name": "main", "image": "i"}], "schedulingGroup": {"podGroupName": "g"}});
    let pod = pod(spec, json!({}));
    let needed = NeededClaim { name: "c".to_owned(), is_of_template: true };
    let owner = |version: &str, kind: &str, name: &str| json!([{"apiVersion": version, "kind": kind, "name": name, "uid": "g1", "controller": true}]);
    let reserved = |group: &str, name: &str| json!([{"apiGroup": group, "resource": "podgroups", "name": name, "uid": "g1"}]);
    let group = "scheduling.k8s.io";
    let good = owner("scheduling.k8s.io/v1alpha2", "PodGroup", "g");
    let not_owned =
        "ResourceClaim ns/c was not created for Pod ns/p (neither Pod nor PodGroup g is the owner)";
    let not_allowed = "pod p (uid-p) is not allowed to use ResourceClaim c (uid-c)";
    let table = [
        (good.clone(), reserved(group, "g"), ""),
        (owner("scheduling.k8s.io.evil/v1", "PodGroup", "g"), reserved(group, "g"), not_owned),
        (owner("scheduling.k8s.io/v1", "Pod", "g"), reserved(group, "g"), not_owned),
        (owner("scheduling.k8s.io/v1", "PodGroup", "h"), reserved(group, "g"), not_owned),
        (good.clone(), reserved(group, "h"), not_allowed),
        (good, reserved("", "g"), not_allowed),
    ];
    for (owner, reserved, error) in table {
        let checked = allocated_claim(&pod, &needed, &claim(owner, reserved, true));
        assert_eq!(checked.err().map(|error| error.to_string()).unwrap_or_default(), error);
    }
}

#[test]
fn a_container_gets_the_requests_that_it_names() {
    let spec = json!({
        "containers": [
            {"name": "all", "image": "i", "resources": {"claims": [{"name": "gpu"}]}},
            {"name": "one", "image": "i", "resources": {"claims": [
                {"name": "gpu", "request": "big"}, {"name": "nic", "request": "x"}, {"name": "gpu", "request": "small"},
            ]}},
            {"name": "none", "image": "i"},
            {"name": "absent", "image": "i", "resources": {"claims": [{"name": "unneeded"}]}},
        ],
        "resourceClaims": [
            {"name": "gpu", "resourceClaimName": "shared"},
            {"name": "nic", "resourceClaimTemplateName": "t"},
            {"name": "unneeded", "resourceClaimTemplateName": "t"},
        ],
    });
    let statuses = json!([{"name": "nic", "resourceClaimName": "p-nic"}, {"name": "unneeded"}]);
    let pod = pod(spec, json!({"resourceClaimStatuses": statuses}));
    let requests = |number: usize| {
        let all = container_requests(&pod, &pods::spec(&pod).containers[number]).unwrap();
        all.iter().map(|(claim, names)| format!("{claim}={}", names.join(","))).collect::<Vec<_>>().join(" ")
    };
    assert_eq!([0, 1, 2, 3].map(requests), ["shared=", "p-nic=x shared=big,small", "", ""]);
}

#[test]
fn a_container_gets_the_requests_of_its_extended_resources() {
    let resources = |requests: Value| json!({"requests": requests});
    let spec = json!({
        "initContainers": [{"name": "init", "image": "i", "resources": resources(json!({"a.com/gpu": "1"}))}],
        "containers": [
            {"name": "main", "image": "i", "resources": resources(json!({
                "a.com/gpu": "2", "deviceclass.resource.kubernetes.io/nic": "1", "cpu": "1"}))},
            {"name": "zero", "image": "i", "resources": resources(json!({"a.com/gpu": "0"}))},
            {"name": "native", "image": "i", "resources": resources(json!({"x.kubernetes.io/y": "1", "cpu": "1"}))},
        ],
    });
    let mapping = |container: &str, resource: &str, request: &str| json!({"containerName": container, "resourceName": resource, "requestName": request});
    let pod = pod(
        spec,
        json!({"extendedResourceClaimStatus": {"resourceClaimName": "p-extended", "requestMappings": [
            mapping("init", "a.com/gpu", "r0"),
            mapping("main", "a.com/gpu", "r1"),
            mapping("main", "a.com/gpu", "r2"),
            mapping("main", "deviceclass.resource.kubernetes.io/nic", "r3"),
            mapping("main", "cpu", "r4"),
            mapping("zero", "a.com/gpu", "r5"),
            mapping("native", "x.kubernetes.io/y", "r6"),
        ]}}),
    );
    let spec = pods::spec(&pod);
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let requests: Vec<_> = containers
        .map(|container| {
            container_requests(&pod, container).unwrap().remove("p-extended").unwrap_or_default().join(",")
        })
        .collect();
    assert_eq!(requests, ["r0", "r1,r2,r3", "", ""]);
    assert!(has_claims(&pod));
    assert_eq!(needed(&pod), "p-extended");
}

#[test]
fn a_request_has_the_devices_of_its_subrequests() {
    let table = [
        ("gpu", "gpu", true),
        ("gpu", "gpu/big", true),
        ("gpu/big", "gpu", true),
        ("gpu/big", "gpu/big", true),
        ("gpu/big", "gpu/small", false),
        ("gpu", "gpu2", false),
        ("gpu", "nic/gpu", false),
    ];
    for (named, reported, expected) in table {
        assert_eq!(is_request(named, reported), expected, "{named} {reported}");
    }
}
