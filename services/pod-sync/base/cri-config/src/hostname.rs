//! Computes hostname and domain of a pod (`pkg/kubelet: GeneratePodHostNameAndDomain`).

use k8s_openapi::api::core::v1::Pod;
use quintlet_model::pod;

use super::error::ConfigError;

// One less than the kernel's limit of 64, as in the kubelet.
const MAX_HOST: usize = 63;
const MAX_FQDN: usize = 64;

/// Hostname and domain of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PodHostname {
    pub(crate) host: String,
    /// Domain, if the pod has a subdomain.
    pub(crate) domain: Option<String>,
}

/// Returns hostname and domain of a pod.
///
/// # Errors
/// `spec.hostname` or `spec.hostnameOverride` is not a valid name.
pub(crate) fn pod_hostname(pod: &Pod, cluster_domain: &str) -> Result<PodHostname, ConfigError> {
    let spec = pod::spec(pod);
    if let Some(name) = spec.hostname_override.as_deref() {
        if let Some(problem) = subdomain_problem(name) {
            return Err(ConfigError::invalid(format!(
                "pod HostnameOverride {name:?} is not a valid DNS subdomain: {problem}"
            )));
        }
        return Ok(PodHostname { host: cut(name), domain: None });
    }
    let host = match spec.hostname.as_deref().filter(|h| !h.is_empty()) {
        Some(name) => {
            if let Some(problem) = label_problem(name) {
                return Err(ConfigError::invalid(format!(
                    "pod Hostname {name:?} is not a valid DNS label: {problem}"
                )));
            }
            name.to_owned()
        }
        None => cut(pod.metadata.name.as_deref().unwrap_or_default()),
    };
    let domain = match spec.subdomain.as_deref().filter(|s| !s.is_empty()) {
        Some(name) => {
            if let Some(problem) = label_problem(name) {
                return Err(ConfigError::invalid(format!(
                    "pod Subdomain {name:?} is not a valid DNS label: {problem}"
                )));
            }
            let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
            Some(format!("{name}.{namespace}.svc.{cluster_domain}"))
        }
        None => None,
    };
    Ok(PodHostname { host, domain })
}

/// Returns the hostname to set in the kernel: the hostname, or the FQDN with `setHostnameAsFQDN`.
///
/// # Errors
/// The FQDN has more than 64 characters.
pub(crate) fn kernel_hostname(pod: &Pod, name: &PodHostname) -> Result<String, ConfigError> {
    let full = pod::spec(pod).set_hostname_as_fqdn.unwrap_or(false);
    match &name.domain {
        Some(domain) if full => {
            let full = format!("{}.{domain}", name.host);
            if full.len() > MAX_FQDN {
                return Err(ConfigError::invalid(format!(
                    "failed to construct FQDN from pod hostname and cluster domain, FQDN {full} is too long \
                     ({MAX_FQDN} characters is the max, {} characters requested)",
                    full.len()
                )));
            }
            Ok(full)
        }
        Some(_) | None => Ok(name.host.clone()),
    }
}

fn cut(name: &str) -> String {
    let end = name.char_indices().map(|(i, _)| i).find(|i| *i >= MAX_HOST).unwrap_or(name.len());
    if name.len() <= MAX_HOST { name.to_owned() } else { name[..end].trim_end_matches(['-', '.']).to_owned() }
}

fn label_chars(text: &str) -> bool {
    let b = text.as_bytes();
    let alnum = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    let (Some(first), Some(last)) = (b.first(), b.last()) else { return false };
    b.iter().all(|c| alnum(*c) || *c == b'-') && alnum(*first) && alnum(*last)
}

fn label_problem(text: &str) -> Option<String> {
    let mut problems = Vec::new();
    if text.len() > 63 {
        problems.push("must be no more than 63 characters".to_owned());
    }
    if !label_chars(text) {
        problems.push(
            "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start \
             and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is \
             '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
                .to_owned(),
        );
    }
    (!problems.is_empty()).then(|| problems.join(";"))
}

fn subdomain_problem(text: &str) -> Option<String> {
    let mut problems = Vec::new();
    if text.len() > 253 {
        problems.push("must be no more than 253 characters".to_owned());
    }
    if !text.split('.').all(label_chars) {
        problems.push(
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must \
             start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is \
             '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
                .to_owned(),
        );
    }
    (!problems.is_empty()).then(|| problems.join(";"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_testkit::pods::pod_of;
    use serde_json::json;

    #[test]
    fn the_hostname_is_that_of_the_spec_or_the_pods_name() {
        let long = "a".repeat(62) + "-.b";
        for (name, spec, want) in [
            ("web", json!({}), Ok(("web", None, "web"))),
            ("web", json!({"hostname": "h"}), Ok(("h", None, "h"))),
            ("web", json!({"subdomain": "s"}), Ok(("web", Some("s.default.svc.cluster.local"), "web"))),
            (
                "web",
                json!({"subdomain": "s", "setHostnameAsFQDN": true}),
                Ok(("web", Some("s.default.svc.cluster.local"), "web.s.default.svc.cluster.local")),
            ),
            ("web", json!({"setHostnameAsFQDN": true}), Ok(("web", None, "web"))),
            ("web", json!({"hostnameOverride": "a.b", "subdomain": "s"}), Ok(("a.b", None, "a.b"))),
            (long.as_str(), json!({}), Ok((&long[..62], None, &long[..62]))),
            (
                "web",
                json!({"hostname": "H"}),
                Err("pod Hostname \"H\" is not a valid DNS label: a lowercase"),
            ),
            ("web", json!({"hostname": "a".repeat(64)}), Err("pod Hostname \"aaa")),
            (
                "web",
                json!({"hostnameOverride": "-"}),
                Err("pod HostnameOverride \"-\" is not a valid DNS subdomain"),
            ),
            (
                "web",
                json!({"hostname": "a".repeat(50), "subdomain": "s", "setHostnameAsFQDN": true}),
                Err("failed to construct FQDN from pod hostname and cluster domain, FQDN aaa"),
            ),
        ] {
            let mut spec = spec;
            spec["containers"] = json!([]);
            let mut p = pod_of(spec.clone());
            p.metadata.name = Some(name.into());
            let got = pod_hostname(&p, "cluster.local")
                .and_then(|n| kernel_hostname(&p, &n).map(|k| (n.host, n.domain, k)))
                .map_err(|e| e.to_string());
            match (got, want) {
                (Ok((host, domain, kernel)), Ok((h, d, k))) => {
                    assert_eq!((host.as_str(), domain.as_deref(), kernel.as_str()), (h, d, k), "{spec}");
                }
                (Err(e), Err(start)) => assert!(e.starts_with(start), "{e}"),
                (got, want) => panic!("{spec}: {got:?} instead of {want:?}"),
            }
        }
    }
}
