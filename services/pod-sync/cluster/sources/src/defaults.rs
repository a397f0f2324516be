//! Sets the defaults of a pod (`pkg/apis/core/v1: SetObjectDefaults_Pod`).
//!
//! The pod with these defaults is hashed for the UIDs of static pods ([`crate::kubelet_uid`]). Another
//! default changes the UIDs of all pods that have it, so that running ones are recreated and
//! `quintlet-static-pod-uids` no longer has them.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Container, EmptyDirVolumeSource, HTTPGetAction, Pod, PodSecurityContext, Probe,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use pod_sync_decisions::qos;

use super::validate;

/// Sets the defaults that the API server would set.
pub fn set_defaults(pod: &mut Pod) {
    let Some(spec) = pod.spec.as_mut() else { return };
    default_text(&mut spec.restart_policy, "Always");
    default_text(&mut spec.dns_policy, "ClusterFirst");
    spec.termination_grace_period_seconds.get_or_insert(30);
    default_text(&mut spec.scheduler_name, "default-scheduler");
    spec.security_context.get_or_insert_with(PodSecurityContext::default);
    spec.enable_service_links.get_or_insert(true);
    let host_network = spec.host_network.unwrap_or(false);
    for container in spec.init_containers.iter_mut().flatten().chain(spec.containers.iter_mut()) {
        container_defaults(container, host_network);
    }
    for volume in spec.volumes.iter_mut().flatten() {
        if validate::has_no_source(volume) {
            // `pkg/apis/core/v1: SetDefaults_Volume`
            volume.empty_dir = Some(EmptyDirVolumeSource::default());
        }
        if let Some(v) = volume.image.as_mut() {
            default_pull_policy(&mut v.pull_policy, v.reference.as_deref());
        }
        if let Some(v) = volume.config_map.as_mut() {
            v.default_mode.get_or_insert(0o644);
        }
        if let Some(v) = volume.secret.as_mut() {
            v.default_mode.get_or_insert(0o644);
        }
        if let Some(v) = volume.downward_api.as_mut() {
            v.default_mode.get_or_insert(0o644);
            for item in v.items.iter_mut().flatten() {
                if let Some(field) = item.field_ref.as_mut() {
                    default_text(&mut field.api_version, "v1");
                }
            }
        }
        if let Some(v) = volume.projected.as_mut() {
            v.default_mode.get_or_insert(0o644);
            for source in v.sources.iter_mut().flatten() {
                if let Some(token) = source.service_account_token.as_mut() {
                    token.expiration_seconds.get_or_insert(3600);
                }
                for item in source.downward_api.iter_mut().flat_map(|d| d.items.iter_mut().flatten()) {
                    if let Some(field) = item.field_ref.as_mut() {
                        default_text(&mut field.api_version, "v1");
                    }
                }
            }
        }
        if let Some(v) = volume.host_path.as_mut() {
            v.type_.get_or_insert_with(String::new);
        }
    }
    pod_resources(pod);
}

// In Go an empty string counts as not set.
fn default_text(field: &mut Option<String>, default: &str) {
    if field.as_deref().unwrap_or_default().is_empty() {
        *field = Some(default.to_owned());
    }
}

fn container_defaults(container: &mut Container, host_network: bool) {
    default_text(&mut container.termination_message_path, "/dev/termination-log");
    default_text(&mut container.termination_message_policy, "File");
    default_pull_policy(&mut container.image_pull_policy, container.image.as_deref());
    for port in container.ports.iter_mut().flatten() {
        default_text(&mut port.protocol, "TCP");
        if host_network && port.host_port.unwrap_or(0) == 0 {
            port.host_port = Some(port.container_port);
        }
    }
    for env in container.env.iter_mut().flatten() {
        let Some(source) = env.value_from.as_mut() else { continue };
        if let Some(field) = source.field_ref.as_mut() {
            default_text(&mut field.api_version, "v1");
        }
        if let Some(key) = source.file_key_ref.as_mut() {
            key.optional.get_or_insert(false);
        }
    }
    if let Some(resources) = container.resources.as_mut()
        && let Some(limits) = resources.limits.clone()
    {
        let requests = resources.requests.get_or_insert_with(BTreeMap::new);
        for (name, quantity) in limits {
            requests.entry(name).or_insert(quantity);
        }
    }
    for probe in [&mut container.liveness_probe, &mut container.readiness_probe, &mut container.startup_probe]
        .into_iter()
        .flatten()
    {
        probe_defaults(probe);
    }
    if let Some(hooks) = container.lifecycle.as_mut() {
        for hook in [&mut hooks.post_start, &mut hooks.pre_stop].into_iter().flatten() {
            if let Some(http) = hook.http_get.as_mut() {
                http_defaults(http);
            }
        }
    }
}

fn default_pull_policy(policy: &mut Option<String>, image: Option<&str>) {
    if policy.as_deref().unwrap_or_default().is_empty() {
        let always = image.is_some_and(has_latest_tag);
        *policy = Some(if always { "Always" } else { "IfNotPresent" }.to_owned());
    }
}

fn http_defaults(http: &mut HTTPGetAction) {
    default_text(&mut http.path, "/");
    default_text(&mut http.scheme, "HTTP");
}

// Pod-level resources: huge page limits default to the sum of the containers' limits. CPU and memory
// requests default to the sum of the containers' requests, or else to the limits.
fn pod_resources(pod: &mut Pod) {
    let Some(own) = pod.spec.as_mut().and_then(|spec| spec.resources.take()) else { return };
    let set = |list: &Option<BTreeMap<String, Quantity>>| list.as_ref().is_some_and(|l| !l.is_empty());
    let mut own = own;
    if set(&own.limits) || set(&own.requests) {
        let together = qos::to_api(&qos::pod_limits_without_overhead(pod));
        let mut limits = own.limits.take().unwrap_or_default();
        for (name, limit) in together.into_iter().filter(|(name, _)| name.starts_with("hugepages-")) {
            limits.entry(name).or_insert(limit);
        }
        let together = qos::to_api(&qos::pod_requests_without_overhead(pod));
        let mut requests = own.requests.take().unwrap_or_default();
        for (name, sum) in together.into_iter().filter(|(name, _)| ["cpu", "memory"].contains(&name.as_str()))
        {
            requests.entry(name).or_insert(sum);
        }
        for (name, limit) in &limits {
            requests.entry(name.clone()).or_insert_with(|| limit.clone());
        }
        own.limits = Some(limits).filter(|l| !l.is_empty());
        own.requests = Some(requests).filter(|r| !r.is_empty());
    }
    if let Some(spec) = pod.spec.as_mut() {
        spec.resources = Some(own);
    }
}

fn probe_defaults(probe: &mut Probe) {
    let or = |field: &mut Option<i32>, default: i32| {
        if field.unwrap_or(0) == 0 {
            *field = Some(default);
        }
    };
    or(&mut probe.timeout_seconds, 1);
    or(&mut probe.period_seconds, 10);
    or(&mut probe.success_threshold, 1);
    or(&mut probe.failure_threshold, 3);
    if let Some(http) = probe.http_get.as_mut() {
        http_defaults(http);
    }
    if let Some(grpc) = probe.grpc.as_mut() {
        grpc.service.get_or_insert_with(String::new);
    }
}

/// Returns whether the tag is `latest`, explicitly or by default, without a digest (`pkg/util/parsers`).
#[must_use]
pub fn has_latest_tag(image: &str) -> bool {
    if image.contains('@') {
        return false;
    }
    let last = image.rsplit('/').next().unwrap_or(image);
    last.rsplit_once(':').is_none_or(|(_, tag)| tag == "latest")
}
