//! TokenRequest for a service account.

use axum::response::Response;
use base64::Engine;
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::reply::ok;
use crate::resources::Resource;
use crate::store::{Store, now};

/// Largest `expirationSeconds` of a token request
/// (`pkg/apis/authentication/validation: ValidateTokenRequest`).
const MAX_TOKEN_SECONDS: i64 = 1 << 32;

/// TokenRequest: returns an unsigned token in the form of a JWT.
pub(super) fn token(
    store: &Store,
    namespace: &str,
    name: &str,
    mut request: Value,
) -> Result<Response, ApiError> {
    let find =
        |plural: &str| Resource::by_plural(plural).ok_or_else(|| ApiError::new(500, "InternalError", plural));
    let account = store.get(find("serviceaccounts")?, namespace, name)?;
    let seconds = request["spec"]["expirationSeconds"].as_i64().unwrap_or(3600);
    let wrong = match seconds {
        ..600 => Some("less than 10 minutes"),
        600..=MAX_TOKEN_SECONDS => None,
        _ => Some("larger than 2^32 seconds"),
    };
    if let Some(wrong) = wrong {
        let kind = Resource { kind: "TokenRequest", ..*find("serviceaccounts")? };
        let cause = format!("Invalid value: {seconds}: may not specify a duration {wrong}");
        return Err(ApiError::invalid(
            &kind,
            "",
            &[("FieldValueInvalid", "spec.expirationSeconds".to_owned(), cause)],
        ));
    }
    let bound = request["spec"]["boundObjectRef"].clone();
    if let Some(pod_name) = bound["name"].as_str().filter(|_| bound["kind"] == json!("Pod")) {
        let pods = find("pods")?;
        let pod = store.get(pods, namespace, pod_name)?;
        let live = pod["metadata"]["uid"].as_str().unwrap_or_default();
        if let Some(uid) = bound["uid"].as_str().filter(|uid| !uid.is_empty() && *uid != live) {
            let why = format!(
                "the UID in the bound object reference ({uid}) does not match the UID in record. The object might have been deleted and then recreated"
            );
            return Err(ApiError::conflict(pods, pod_name, &why));
        }
        if pod["spec"]["serviceAccountName"] != json!(name) {
            return Err(ApiError::bad_request(format!(
                "cannot bind token for serviceaccount {name:?} to pod running with different serviceaccount name."
            )));
        }
    }
    let issued = jiff::Timestamp::now();
    let expires = issued + jiff::SignedDuration::from_secs(seconds);
    if request["spec"]["audiences"].as_array().is_none_or(Vec::is_empty) {
        request["spec"]["audiences"] = json!(["https://kubernetes.default.svc.cluster.local"]);
    }
    request["spec"]["expirationSeconds"] = json!(seconds);
    let claims = json!({
        "aud": request["spec"]["audiences"], "iat": issued.as_second(), "nbf": issued.as_second(), "exp": expires.as_second(),
        "iss": "https://kubernetes.default.svc.cluster.local", "jti": uuid::Uuid::new_v4().to_string(),
        "sub": format!("system:serviceaccount:{namespace}:{name}"),
        "kubernetes.io": {"namespace": namespace, "serviceaccount": {"name": name, "uid": account["metadata"]["uid"]},
            "pod": {"name": bound["name"], "uid": bound["uid"]}},
    });
    let part = |value: &Value| base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(value.to_string());
    request["kind"] = json!("TokenRequest");
    request["apiVersion"] = json!("authentication.k8s.io/v1");
    request["metadata"] = json!({"name": name, "namespace": namespace, "creationTimestamp": now()});
    request["status"] = json!({
        "token": format!("{}.{}.unsigned", part(&json!({"alg": "none", "typ": "JWT"})), part(&claims)),
        "expirationTimestamp": expires.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
    });
    Ok(ok(201, &request))
}
