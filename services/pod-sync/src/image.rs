//! Having an image before a container starts (pod-sync.md §7.1-§7.4).

use k8s_cri::v1 as cri;
use k8s_openapi::api::core::v1::{Container, Pod};

use crate::clients::events::EventType;
use crate::clients::runtime::CallError;
use crate::context::Context;
use crate::decide::backoff::{Delays, PullBackoff, Turn};
use crate::decide::container_status::WaitingReason;

/// Prefixes a runtime puts before its text, with the reason they stand for.
const SPECIAL: [(&str, &str); 2] = [
    ("RegistryUnavailable", "because the registry is unavailable"),
    ("SignatureValidationFailed", "because the signature validation failed"),
];

/// Why there is no image.
#[derive(Debug)]
pub enum NoImage {
    /// The container waits with this reason. The back-off, where one began, ends at this boottime.
    Waits(WaitingReason, Option<std::time::Duration>),
    /// Nothing is known: the call was cut.
    Interrupted(CallError),
}

fn waits(reason: &str, message: String) -> NoImage {
    NoImage::Waits(WaitingReason { reason: reason.to_owned(), message }, None)
}

/// An image that can be run.
#[derive(Debug, Clone)]
pub struct Ready {
    /// What the runtime calls it.
    pub image_ref: String,
    /// What it says of it: the user above all.
    pub image: Option<cri::Image>,
}

/// The name with a tag, as the runtime is asked for it.
///
/// # Errors
/// It cannot be an image's name.
pub fn with_tag(image: &str) -> Result<String, String> {
    let usable = !image.is_empty() && image.bytes().all(|b| b.is_ascii_graphic()) && !image.contains("://");
    let last = image.rsplit('/').next().unwrap_or_default();
    if !usable || last.is_empty() || last.starts_with([':', '@']) {
        return Err(format!("couldn't parse image name {image:?}: invalid reference format"));
    }
    if image.bytes().any(|b| b.is_ascii_uppercase()) && !image.contains([':', '@']) {
        return Err(format!(
            "couldn't parse image name {image:?}: invalid reference format: repository name must be lowercase"
        ));
    }
    Ok(if last.contains(':') || last.contains('@') { image.to_owned() } else { format!("{image}:latest") })
}

/// Makes sure the image of a container is there.
///
/// # Errors
/// The container waits, or nothing is known.
pub async fn ensure(
    ctx: &Context,
    pod: &Pod,
    container: &Container,
    field_path: &str,
    backoff: &mut PullBackoff,
    sandbox_config: &cri::PodSandboxConfig,
) -> Result<Ready, NoImage> {
    let spec_image = container.image.as_deref().unwrap_or_default();
    let event = |kind, reason: &str, message: String| ctx.events.pod(pod, kind, reason, &message, field_path);
    let image = with_tag(spec_image).map_err(|why| {
        event(
            EventType::Warning,
            "InspectFailed",
            format!("Failed to apply default image tag {spec_image:?}: {why}"),
        );
        waits("InvalidImageName", format!("Failed to apply default image tag {spec_image:?}: {why}"))
    })?;
    let policy = container.image_pull_policy.as_deref().unwrap_or("IfNotPresent");
    let annotations = pod.metadata.annotations.clone().unwrap_or_default().into_iter().collect();
    let spec = cri::ImageSpec { image: image.clone(), annotations, ..cri::ImageSpec::default() };
    if policy != "Always" {
        match ctx.runtime.image_status(spec.clone()).await {
            Ok(Some(found)) => {
                event(
                    EventType::Normal,
                    "Pulled",
                    format!(
                        "Container image {spec_image:?} already present on machine and can be accessed by the pod"
                    ),
                );
                return Ok(Ready { image_ref: found.id.clone(), image: Some(found) });
            }
            Ok(None) => {}
            Err(e) if e.is_verdict() => {
                event(EventType::Warning, "InspectFailed", format!("Failed to inspect image \"\": {e}"));
                return Err(waits("ImageInspectError", format!("Failed to inspect image \"\": {e}")));
            }
            Err(e) => return Err(NoImage::Interrupted(e)),
        }
        if policy == "Never" {
            let message = format!("Container image {spec_image:?} is not present with pull policy of Never");
            event(EventType::Warning, "ErrImageNeverPull", message.clone());
            return Err(waits("ErrImageNeverPull", message));
        }
    }
    pull(ctx, pod, spec_image, spec, event, backoff, sandbox_config).await
}

async fn pull(
    ctx: &Context,
    pod: &Pod,
    spec_image: &str,
    spec: cri::ImageSpec,
    event: impl Fn(EventType, &str, String),
    backoff: &mut PullBackoff,
    sandbox_config: &cri::PodSandboxConfig,
) -> Result<Ready, NoImage> {
    let image = spec.image.clone();
    if let Turn::Later { until, .. } = backoff.turn(&image, ctx.clock.boot(), Delays::default()) {
        event(EventType::Normal, "BackOff", format!("Back-off pulling image {spec_image:?}"));
        let reason =
            WaitingReason { reason: "ImagePullBackOff".to_owned(), message: backoff.message(&image) };
        return Err(NoImage::Waits(reason, Some(until)));
    }
    event(EventType::Normal, "Pulling", format!("Pulling image {spec_image:?}"));
    let asked = ctx.clock.boot();
    let mut began = asked;
    let pulled = ctx
        .pulls
        .run(&image, async {
            began = ctx.clock.boot();
            ctx.runtime.pull_image(spec.clone(), None, sandbox_config.clone()).await
        })
        .await;
    match pulled {
        Ok(image_ref) => {
            let found = ctx
                .runtime
                .image_status(cri::ImageSpec { image: image_ref.clone(), ..spec })
                .await
                .ok()
                .flatten();
            let ms = |d: std::time::Duration| {
                crate::decide::backoff::go_duration(std::time::Duration::from_millis(
                    u64::try_from(d.as_millis()).unwrap_or(u64::MAX),
                ))
            };
            let now = ctx.clock.boot();
            let size = found.as_ref().map_or(0, |i| i.size);
            let (took, whole) = (ms(now.saturating_sub(began)), ms(now.saturating_sub(asked)));
            event(
                EventType::Normal,
                "Pulled",
                format!(
                    "Successfully pulled image {spec_image:?} in {took} ({whole} including waiting). Image size: {size} bytes."
                ),
            );
            tracing::debug!(pod.uid = pod.metadata.uid, image, "pulled");
            Ok(Ready { image_ref, image: found })
        }
        Err(e) if e.is_verdict() => {
            let text = e.message.clone();
            event(EventType::Warning, "Failed", format!("Failed to pull image {spec_image:?}: {text}"));
            let special = SPECIAL.iter().find(|(prefix, _)| text.starts_with(prefix));
            let (reason, message) = match special {
                Some((reason, why)) => {
                    (*reason, format!("image pull failed for {spec_image} {why}{}", &text[reason.len()..]))
                }
                None => ("ErrImagePull", text),
            };
            backoff.failed(&image, ctx.clock.boot(), Delays::default(), reason, &message);
            let until = match backoff.turn(&image, ctx.clock.boot(), Delays::default()) {
                Turn::Later { until, .. } => Some(until),
                Turn::Now => None,
            };
            Err(NoImage::Waits(WaitingReason { reason: reason.to_owned(), message }, until))
        }
        Err(e) => Err(NoImage::Interrupted(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_gets_the_tag_latest_and_a_bad_one_is_refused() {
        for (name, want) in [
            ("busybox", Some("busybox:latest")),
            ("busybox:1", Some("busybox:1")),
            ("h:5000/a/b", Some("h:5000/a/b:latest")),
            ("a@sha256:00", Some("a@sha256:00")),
            ("", None),
            ("a b", None),
            ("Upper", None),
            ("http://x/y", None),
            ("x/", None),
        ] {
            assert_eq!(with_tag(name).ok().as_deref(), want, "{name}");
        }
    }
}
