//! Ensures that the image of a container exists (`pkg/kubelet/images: EnsureImageExists`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, Secret};
use pod_sync_clients::{CallError, EventType};
use pod_sync_decisions::backoff::{BackoffDecision, BackoffDelays, ImagePullBackoffs};
use pod_sync_decisions::container_status::WaitingReason;
use pod_sync_decisions::waiting::StartFailure;
use pod_sync_images::credentials::keyring::Credential;
use pod_sync_images::credentials::{InvalidPullSecret, PresentedCredential};
use pod_sync_images::pull_records::{Access, PullInProgress};
use pod_sync_node_decisions::image_access::PullCredentials;
use quintlet_cri_api::v1 as cri;
use quintlet_kit::task::blocking;

use crate::context::PullContext;
pub(crate) use pod_sync_node_decisions::image_name::with_tag;

/// Texts in pull errors of a runtime that have a waiting reason of their own.
const SPECIAL: [(StartFailure, &str); 2] = [
    (StartFailure::RegistryUnavailable, "because the registry is unavailable"),
    (StartFailure::SignatureValidationFailed, "because the signature validation failed"),
];

/// An image is not available.
#[derive(Debug)]
pub(crate) enum NoImage {
    /// The container waits with this reason.
    Waits(WaitingReason),
    /// The call was interrupted.
    Interrupted(CallError),
}

fn waits(reason: StartFailure, message: String) -> NoImage {
    NoImage::Waits(reason.with_message(message))
}

/// An image that exists on the node.
#[derive(Debug, Clone)]
pub(crate) struct Ready {
    /// The reference that the runtime uses.
    pub image_ref: String,
    /// The description by the runtime, which includes the user.
    pub image: cri::Image,
}

/// Image volumes of a pod by name: the image to mount, or the waiting reason of the containers that mount it.
pub(crate) type Volumes = BTreeMap<String, Result<cri::ImageSpec, WaitingReason>>;

/// An image that a container or an image volume needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted<'a> {
    pub pod: &'a Pod,
    /// The image in the spec.
    pub image: &'a str,
    /// `imagePullPolicy` or `pullPolicy`.
    pub policy: &'a str,
    /// Field path of the events.
    pub field_path: &'a str,
    /// The pod's pull secrets.
    pub secrets: &'a [Arc<Secret>],
    /// Passed to the runtime with the pull.
    pub sandbox_config: &'a cri::PodSandboxConfig,
}

impl Wanted<'_> {
    fn event(&self, ctx: &PullContext, kind: EventType, reason: &str, message: &str) {
        ctx.reporting.events.pod(self.pod, kind, reason, message, self.field_path);
    }
}

/// Ensures that an image exists and may be used. Calls `begins` before a pull.
///
/// # Errors
/// The image is not available and the container waits, or a call was interrupted.
pub(crate) async fn ensure(
    ctx: &PullContext,
    wanted: Wanted<'_>,
    backoff: &mut ImagePullBackoffs,
    begins: impl FnOnce() + Send,
) -> Result<Ready, NoImage> {
    let name = wanted.image;
    let image = with_tag(name).map_err(|why| {
        let text = format!("Failed to apply default image tag {name:?}: {why}");
        wanted.event(ctx, EventType::Warning, "InspectFailed", &text);
        waits(StartFailure::InvalidImageName, text)
    })?;
    let annotations = wanted.pod.metadata.annotations.clone().unwrap_or_default().into_iter().collect();
    let spec = cri::ImageSpec { image: image.clone(), annotations, ..cri::ImageSpec::default() };
    if wanted.policy != "Always" {
        match ctx.runtime.calls.image_status(spec.clone()).await {
            Ok(Some(found)) => {
                if may_use(ctx, wanted, &image, &found.id).await {
                    let text = format!(
                        "Container image {name:?} already present on machine and can be accessed by the pod"
                    );
                    wanted.event(ctx, EventType::Normal, "Pulled", &text);
                    return Ok(Ready { image_ref: found.id.clone(), image: found });
                }
            }
            Ok(None) => {}
            Err(e) if e.is_refused_by_runtime() => {
                let text = format!("Failed to inspect image \"\": {e}");
                wanted.event(ctx, EventType::Warning, "InspectFailed", &text);
                return Err(waits(StartFailure::ImageInspectError, text));
            }
            Err(e) => return Err(NoImage::Interrupted(e)),
        }
        // The same text as for an image that the pod may not use: a pod must not learn which images exist on
        // the node.
        if wanted.policy == "Never" {
            let text = format!("Container image {name:?} is not present with pull policy of Never");
            wanted.event(ctx, EventType::Warning, "ErrImageNeverPull", &text);
            return Err(waits(StartFailure::ErrImageNeverPull, text));
        }
    }
    pull(ctx, wanted, spec, backoff, begins).await
}

async fn pull(
    ctx: &PullContext,
    wanted: Wanted<'_>,
    spec: cri::ImageSpec,
    backoff: &mut ImagePullBackoffs,
    begins: impl FnOnce() + Send,
) -> Result<Ready, NoImage> {
    let (name, image) = (wanted.image, spec.image.clone());
    if let BackoffDecision::BackOff { .. } =
        backoff.decide(&image, ctx.clock.boot(), BackoffDelays::default())
    {
        wanted.event(ctx, EventType::Normal, "BackOff", &format!("Back-off pulling image {name:?}"));
        let reason = StartFailure::ImagePullBackOff.with_message(backoff.message(&image));
        return Err(NoImage::Waits(reason));
    }
    begins();
    wanted.event(ctx, EventType::Normal, "Pulling", &format!("Pulling image {name:?}"));
    let requested = ctx.clock.boot();
    let mut began = requested;
    let lane = async {
        began = ctx.clock.boot();
        try_all(ctx, wanted, &spec).await
    };
    let pulled = ctx.images.pulls.run(&image, lane).await;
    let uid = wanted.pod.metadata.uid.as_deref().unwrap_or_default();
    ctx.reporting.metrics.start_latency.image_pulled(uid, ctx.clock.boot().saturating_sub(requested));
    match pulled {
        Ok(Pulled { image_ref, pull_credentials, begun }) => {
            let found =
                ctx.runtime.calls.image_status(cri::ImageSpec { image: image_ref.clone(), ..spec }).await;
            // Recorded under the name that a later lookup uses.
            let id = found.as_ref().ok().and_then(Option::as_ref).map_or(&image_ref, |i| &i.id);
            let id = id.clone();
            blocking(move || begun.pulled(&id, pull_credentials)).await;
            let found = inspected(found, name)?;
            let ms = |d: Duration| {
                let whole = u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
                quintlet_model::go_duration::format(Duration::from_millis(whole))
            };
            let now = ctx.clock.boot();
            let size = found.size;
            ctx.reporting.metrics.operations.image_pulled(size, now.saturating_sub(requested));
            let (took, whole) = (ms(now.saturating_sub(began)), ms(now.saturating_sub(requested)));
            let text = format!(
                "Successfully pulled image {name:?} in {took} ({whole} including waiting). Image size: {size} bytes."
            );
            wanted.event(ctx, EventType::Normal, "Pulled", &text);
            tracing::debug!(pod.uid = wanted.pod.metadata.uid, image, "pulled image");
            Ok(Ready { image_ref, image: found })
        }
        Err(NotPulled::Failed(text)) => {
            let failed = format!("Failed to pull image {name:?}: {text}");
            wanted.event(ctx, EventType::Warning, "Failed", &failed);
            let (reason, message) = failure_of(name, text);
            let (now, delays) = (ctx.clock.boot(), BackoffDelays::default());
            backoff.record_failure(&image, now, delays, reason.as_str(), &message);
            Err(NoImage::Waits(reason.with_message(message)))
        }
        Err(NotPulled::Interrupted(e)) => Err(NoImage::Interrupted(e)),
    }
}

/// Returns the waiting reason and message for the error of a pull.
fn failure_of(name: &str, text: String) -> (StartFailure, String) {
    let special = SPECIAL.iter().find_map(|(reason, why)| {
        let rest = text.strip_prefix(reason.as_str())?;
        Some((*reason, format!("image pull failed for {name} {why}{rest}")))
    });
    special.unwrap_or((StartFailure::ErrImagePull, text))
}

/// Returns the description of a pulled image. Without the user in it, a container would run as root.
fn inspected(found: Result<Option<cri::Image>, CallError>, name: &str) -> Result<cri::Image, NoImage> {
    let error = match found {
        Ok(Some(image)) => return Ok(image),
        Ok(None) => "the runtime does not have it".to_owned(),
        Err(e) if e.is_refused_by_runtime() => e.to_string(),
        Err(e) => return Err(NoImage::Interrupted(e)),
    };
    let text = format!("failed to get the user of image {name:?} after its pull: {error}");
    Err(waits(StartFailure::CreateContainerConfigError, text))
}

struct Pulled {
    image_ref: String,
    // The credentials that may use the image.
    pull_credentials: PullCredentials,
    begun: PullInProgress,
}

// Whether the pod may use an image that is there (`pkg/kubelet/images/pullmanager: MustAttemptImagePull`).
async fn may_use(ctx: &PullContext, wanted: Wanted<'_>, image: &str, id: &str) -> bool {
    match ctx.images.pull_records.access(image, id) {
        Access::Free => return true,
        Access::Pull => return false,
        Access::Ask => {}
    }
    // Unreadable secrets make the pull fail with an error of its own.
    let Ok(presented) = credentials(ctx, wanted, image).await else { return false };
    let (mut secrets, mut accounts) = (Vec::new(), Vec::new());
    for one in presented {
        let pull_credentials = one.owner.pull_credentials();
        secrets.extend(pull_credentials.kubernetes_secrets);
        accounts.extend(pull_credentials.kubernetes_service_accounts);
    }
    let records = ctx.images.pull_records.clone();
    let (image, id) = (image.to_owned(), id.to_owned());
    blocking(move || records.may_use(&image, &id, &secrets, &accounts)).await
}

async fn credentials(
    ctx: &PullContext,
    wanted: Wanted<'_>,
    image: &str,
) -> Result<Vec<PresentedCredential>, InvalidPullSecret> {
    let (tokens, objects) = (ctx.environment.tokens.as_deref(), ctx.environment.objects.as_ref());
    let accounts =
        ctx.images.credentials.accounts(image, wanted.pod, tokens, objects, ctx.clock.wall()).await;
    ctx.images.credentials.of(image, wanted.secrets, &accounts, ctx.clock.boot()).await
}

enum NotPulled {
    Failed(String),
    Interrupted(CallError),
}

/// Pulls with each credential in order until one is accepted. The pull is anonymous only if there are no
/// credentials.
async fn try_all(ctx: &PullContext, wanted: Wanted<'_>, spec: &cri::ImageSpec) -> Result<Pulled, NotPulled> {
    if !ctx.images.pulls.try_start(ctx.clock.boot()) {
        return Err(NotPulled::Failed("pull QPS exceeded".to_owned()));
    }
    let presented = credentials(ctx, wanted, &spec.image)
        .await
        .map_err(|e| NotPulled::Failed(quintlet_kit::error_chain(&e)))?;
    let mut tries: Vec<(Option<Credential>, PullCredentials)> = Vec::new();
    for PresentedCredential { credential, owner } in presented {
        if !tries.iter().any(|(tried, _)| tried.as_ref() == Some(&credential)) {
            tries.push((Some(credential), owner.pull_credentials()));
        }
    }
    if tries.is_empty() {
        tries.push((None, PullCredentials::node_wide()));
    }
    let (records, image) = (ctx.images.pull_records.clone(), spec.image.clone());
    let begun = blocking(move || records.begin(&image)).await;
    let begun = begun.map_err(|e| NotPulled::Failed(format!("failed to record image pull intent: {e}")))?;
    let mut errors: Vec<String> = Vec::new();
    for (credential, pull_credentials) in tries {
        let auth = credential.map(|c| cri::AuthConfig {
            username: c.username,
            password: c.password,
            ..cri::AuthConfig::default()
        });
        match ctx.runtime.calls.pull_image(spec.clone(), auth, wanted.sandbox_config.clone()).await {
            Ok(image_ref) => return Ok(Pulled { image_ref, pull_credentials, begun }),
            Err(e) if e.is_refused_by_runtime() => {
                if !errors.contains(&e.message) {
                    errors.push(e.message);
                }
            }
            Err(e) => return Err(NotPulled::Interrupted(e)),
        }
    }
    blocking(move || begun.failed()).await;
    Err(NotPulled::Failed(match &mut errors[..] {
        [one] => std::mem::take(one),
        many => format!("[{}]", many.join(", ")),
    }))
}

#[cfg(test)]
mod tests {
    use quintlet_model::outcome::Outcome;

    use super::*;

    #[test]
    fn an_image_whose_user_is_not_known_does_not_start() {
        let failed = |outcome| CallError {
            method: "ImageStatus",
            outcome,
            code: tonic::Code::Unknown,
            message: "no".to_owned(),
        };
        let image = cri::Image { username: "www".to_owned(), ..cri::Image::default() };
        assert_eq!(inspected(Ok(Some(image.clone())), "web").unwrap(), image);
        for (found, want) in [
            (
                Ok(None),
                "failed to get the user of image \"web\" after its pull: the runtime does not have it",
            ),
            (
                Err(failed(Outcome::RuntimeError)),
                "failed to get the user of image \"web\" after its pull: no",
            ),
        ] {
            match inspected(found, "web") {
                Err(NoImage::Waits(reason)) => {
                    assert_eq!(
                        (reason.reason.as_str(), reason.message.as_str()),
                        ("CreateContainerConfigError", want)
                    );
                }
                other => panic!("{other:?}"),
            }
        }
        for outcome in [Outcome::Unknown, Outcome::NotDispatched] {
            assert!(matches!(inspected(Err(failed(outcome)), "web"), Err(NoImage::Interrupted(_))));
        }
    }
}
