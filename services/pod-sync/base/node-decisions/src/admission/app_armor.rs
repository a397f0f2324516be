//! Checks whether the node can enforce a pod's AppArmor profiles (`pkg/security/apparmor`).

use k8s_openapi::api::core::v1::{AppArmorProfile, Container, Pod};
use quintlet_model::pod;

/// Returns why a required profile cannot be enforced. Pods that already run are not checked.
pub(super) fn unenforceable(pod: &Pod, enabled: bool) -> Option<String> {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    if phase.is_some_and(|p| !p.is_empty() && p != "Pending") {
        return None;
    }
    let spec = pod::spec(pod);
    let inits = pod::init_containers(pod);
    let wanted: Vec<Profile> = inits
        .iter()
        .chain(&spec.containers)
        .filter_map(|c| profile(pod, c))
        .filter(|p| p.is_confined())
        .collect();
    if wanted.is_empty() {
        return None;
    }
    if !enabled {
        return Some("AppArmor is not enabled on the host".to_owned());
    }
    let nameless = wanted.iter().any(|p| p.kind == "Localhost" && p.name.trim().is_empty());
    nameless.then(|| "localhostProfile must be set if appArmorProfile type is Localhost".to_owned())
}

struct Profile {
    kind: String,
    name: String,
}

impl Profile {
    fn of(field: &AppArmorProfile) -> Self {
        Self { kind: field.type_.clone(), name: field.localhost_profile.clone().unwrap_or_default() }
    }

    fn is_confined(&self) -> bool {
        self.kind != "Unconfined"
    }
}

/// Returns the profile of the container, of its beta annotation, or of the pod, in this order.
fn profile(pod: &Pod, container: &Container) -> Option<Profile> {
    let own = container.security_context.as_ref().and_then(|s| s.app_armor_profile.as_ref());
    if let Some(own) = own {
        return Some(Profile::of(own));
    }
    let key = format!("container.apparmor.security.beta.kubernetes.io/{}", container.name);
    match pod::annotation(pod, &key) {
        Some("unconfined") => return Some(Profile { kind: "Unconfined".to_owned(), name: String::new() }),
        Some(text) if text.starts_with("localhost/") => {
            let name = text["localhost/".len()..].to_owned();
            return Some(Profile { kind: "Localhost".to_owned(), name });
        }
        Some("runtime/default") => {
            return Some(Profile { kind: "RuntimeDefault".to_owned(), name: String::new() });
        }
        Some(_) | None => {}
    }
    let context = pod::spec(pod).security_context.as_ref();
    context.and_then(|s| s.app_armor_profile.as_ref()).map(Profile::of)
}
