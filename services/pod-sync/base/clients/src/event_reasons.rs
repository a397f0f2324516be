//! Compares the events of a kubelet with those of Quintlet.

use std::path::Path;

/// The reasons with which a kubelet 1.36 records events on Linux (pkg/kubelet/events, and literals in
/// pkg/kubelet and pkg/volume), and the file below `services` that has the reason of Quintlet's event. An
/// empty place: Quintlet has no such event.
const REASONS: [(&str, &str); 98] = [
    // Containers.
    ("Created", "pod-sync/worker/src/worker/create.rs"),
    ("Started", "pod-sync/worker/src/worker/start.rs"),
    ("Failed", "pod-sync/worker/src/worker/start.rs"),
    ("Killing", "pod-sync/worker/src/worker/container_stop.rs"),
    ("Preempting", "pod-sync/base/node-decisions/src/preempt.rs"),
    ("BackOff", "pod-sync/worker/src/worker/sync.rs"),
    ("ExceededGracePeriod", "pod-sync/src/eviction.rs"),
    ("Unhealthy", "pod-sync/worker/src/worker/probes.rs"),
    ("ProbeWarning", "probe-service/src/slot.rs"),
    ("FailedPostStartHook", "pod-sync/worker/src/worker/post_start.rs"),
    ("FailedPreStopHook", "pod-sync/worker/src/worker/container_stop.rs"),
    ("LifecycleHTTPFallback", "pod-sync/worker/src/worker/hooks.rs"),
    // Pods.
    ("FailedKillPod", "pod-sync/worker/src/worker/stop.rs"),
    ("FailedCreatePodContainer", "pod-sync/worker/src/worker/prepare.rs"),
    ("NetworkNotReady", "pod-sync/worker/src/worker/sync.rs"),
    ("ResizeDeferred", "pod-sync/base/decisions/src/resize/feasibility.rs"),
    ("ResizeInfeasible", "pod-sync/base/decisions/src/resize/feasibility.rs"),
    ("ResizeStarted", "pod-sync/src/pod_manager/resize.rs"),
    ("ResizeCompleted", "pod-sync/worker/src/worker/tracker.rs"),
    ("ResizeError", "pod-sync/worker/src/worker/resize.rs"),
    ("FailedNodeDeclaredFeaturesCheck", "pod-sync/src/pod_manager/updates.rs"),
    ("SandboxChanged", "pod-sync/worker/src/worker/stop.rs"),
    ("FailedCreatePodSandBox", "pod-sync/worker/src/worker/sandbox.rs"),
    ("FailedPodSandBoxStatus", "pod-sync/worker/src/worker/sandbox.rs"),
    ("FailedPrepareDynamicResources", "pod-sync/worker/src/worker/claims.rs"),
    ("FailedSync", "pod-sync/worker/src/worker/tracker.rs"),
    ("FailedValidation", "pod-sync/src/pod_manager/updates.rs"),
    ("DeadlineExceeded", "pod-sync/base/decisions/src/status.rs"),
    ("DNSConfigForming", "pod-sync/base/cri-config/src/dns.rs"),
    ("MissingClusterDNS", "pod-sync/base/cri-config/src/dns.rs"),
    ("FailedToRetrieveImagePullSecret", "pod-sync/worker/src/worker/setup.rs"),
    ("HostIPsIPFamilyMismatch", ""),
    ("Denied", "pod-sync/cluster/certificates/src/pod_certificates/decide.rs"),
    ("CertificateOverdueForRefresh", "pod-sync/cluster/certificates/src/pod_certificates/decide.rs"),
    ("CertificateExpired", "pod-sync/cluster/certificates/src/pod_certificates/decide.rs"),
    // Rejections.
    ("Evicted", "pod-sync/node/eviction/src/lib.rs"),
    ("NodeShutdown", "pod-sync/base/node-decisions/src/admission/mod.rs"),
    ("SysctlForbidden", "pod-sync/base/node-decisions/src/admission/mod.rs"),
    ("AppArmor", "pod-sync/base/node-decisions/src/admission/mod.rs"),
    ("InvalidNodeInfo", "pod-sync/base/node-decisions/src/admission/mod.rs"),
    ("PodOSSelectorNodeLabelDoesNotMatch", "pod-sync/base/node-decisions/src/admission/node.rs"),
    ("PodOSNotSupported", "pod-sync/base/node-decisions/src/admission/node.rs"),
    ("SupplementalGroupsPolicyNotSupported", "pod-sync/base/node-decisions/src/admission/mod.rs"),
    ("PodFeatureUnsupported", "pod-sync/base/node-decisions/src/admission/mod.rs"),
    ("UnexpectedAdmissionError", "pod-sync/base/decisions/src/status.rs"),
    ("VolumeAttachmentLimitExceeded", "pod-sync/base/decisions/src/status.rs"),
    ("OutOf", "pod-sync/base/node-decisions/src/admission/resources.rs"),
    ("TaintToleration", "pod-sync/base/node-decisions/src/admission/node.rs"),
    ("NodeAffinity", "pod-sync/base/node-decisions/src/admission/node.rs"),
    ("NodeName", "pod-sync/base/node-decisions/src/admission/node.rs"),
    ("NodePorts", "pod-sync/base/node-decisions/src/admission/node.rs"),
    ("TopologyAffinityError", "pod-sync/base/decisions/src/status.rs"),
    ("EmptyPodSharedPoolError", "pod-sync/base/decisions/src/status.rs"),
    ("PodLevelResourcesNotSupported", ""),
    ("UnknownReason", ""),
    ("UnexpectedPredicateFailureType", ""),
    // Images.
    ("Pulling", "pod-sync/worker/src/image.rs"),
    ("Pulled", "pod-sync/worker/src/image.rs"),
    ("InspectFailed", "pod-sync/worker/src/image.rs"),
    ("ErrImageNeverPull", "pod-sync/worker/src/image.rs"),
    ("InvalidDiskCapacity", "pod-sync/src/image_gc.rs"),
    ("FreeDiskSpaceFailed", "pod-sync/src/image_gc.rs"),
    ("InvalidImageID", ""),
    // Volumes.
    ("FailedAttachVolume", "pod-sync/volumes/manager/src/executor.rs"),
    ("FailedMount", "pod-sync/volumes/manager/src/work.rs"),
    ("FailedMapVolume", "pod-sync/volumes/manager/src/work.rs"),
    ("AlreadyMountedVolume", "pod-sync/volumes/manager/src/mount_in_tree.rs"),
    ("SuccessfulAttachVolume", ""),
    ("SuccessfulMountVolume", "pod-sync/volumes/manager/src/executor.rs"),
    ("VolumeResizeFailed", "pod-sync/volumes/manager/src/executor.rs"),
    ("VolumeResizeSuccessful", ""),
    ("FileSystemResizeFailed", "pod-sync/volumes/manager/src/expansion.rs"),
    ("FileSystemResizeSuccessful", "pod-sync/volumes/manager/src/expansion.rs"),
    ("VolumePermissionChangeInProgress", "pod-sync/volumes/direct/src/ownership.rs"),
    ("FailedMountOnFilesystemMismatch", "pod-sync/volumes/manager/src/mount_in_tree.rs"),
    // The node.
    ("Starting", "pod-sync/src/startup/clients.rs"),
    ("KubeletSetupFailed", "pod-sync/base/clients/src/events.rs"),
    ("NodeReady", "status-reporter/src/node/setters/conditions.rs"),
    ("NodeNotReady", "status-reporter/src/node/setters/conditions.rs"),
    ("NodeSchedulable", "status-reporter/src/node/setters.rs"),
    ("NodeNotSchedulable", "status-reporter/src/node/setters.rs"),
    ("NodeHasSufficientMemory", "status-reporter/src/node/setters/conditions.rs"),
    ("NodeHasInsufficientMemory", "status-reporter/src/node/setters/conditions.rs"),
    ("NodeHasNoDiskPressure", "status-reporter/src/node/setters/conditions.rs"),
    ("NodeHasDiskPressure", "status-reporter/src/node/setters/conditions.rs"),
    ("NodeHasSufficientPID", "status-reporter/src/node/setters/conditions.rs"),
    ("NodeHasInsufficientPID", "status-reporter/src/node/setters/conditions.rs"),
    ("Rebooted", "status-reporter/src/node/setters.rs"),
    ("Shutdown", "pod-sync/node/shutdown/src/lib.rs"),
    ("ContainerGCFailed", "pod-sync/worker/src/worker/removal.rs"),
    ("ImageGCFailed", "pod-sync/src/image_gc.rs"),
    ("FailedNodeAllocatableEnforcement", "pod-sync/node/object/src/node_cgroups.rs"),
    ("NodeAllocatableEnforced", "pod-sync/node/object/src/node_cgroups.rs"),
    ("EvictionThresholdMet", "pod-sync/node/eviction/src/lib.rs"),
    ("SystemOOM", "pod-sync/node/eviction-loop/src/kernel_log.rs"),
    ("CgroupV1", "pod-sync/node/object/src/machine_checks.rs"),
    ("PossibleMemoryBackedVolumesOnDisk", "pod-sync/node/object/src/machine_checks.rs"),
    ("CheckLimitsForResolvConf", "pod-sync/src/startup/clients.rs"),
];

#[test]
fn each_event_of_a_kubelet_is_recorded_or_has_a_reason_in_the_documentation() {
    let services = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    let page = include_str!("../../../../../docs/support.md");
    let (_, table) = page.split_once("\n### Events of the kubelet\n").unwrap();
    let table = table.split("\n#").next().unwrap();
    let names: Vec<&str> = table
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once(" | "))
        .flat_map(|(reasons, _)| reasons.split('`').filter(|name| !name.is_empty() && *name != ", "))
        .collect();
    for (reason, place) in REASONS {
        assert_eq!(names.contains(&reason), place.is_empty(), "{reason}: in the table of docs/support.md");
        if !place.is_empty() {
            let code = std::fs::read_to_string(services.join(place)).unwrap();
            // Tests of the file do not record events.
            let code = code.split("#[cfg(test)]\nmod tests {").next().unwrap();
            assert!(code.contains(&format!("\"{reason}")), "{reason} is not in {place}");
        }
    }
    let known = |name: &&str| REASONS.iter().any(|(reason, _)| reason == name);
    assert!(names.iter().all(known), "{names:?} has a reason that no kubelet uses");
}
