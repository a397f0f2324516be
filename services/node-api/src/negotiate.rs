//! Content negotiation of `/statusz` and `/flagz` by `Accept`.
//!
//! As in Kubernetes 1.36 (`staging/src/k8s.io/apiserver/pkg/endpoints/handlers/negotiation`): a client that
//! names group, version and kind gets an object, other clients get text. CBOR is behind a feature gate that
//! is off.

use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};

use node_api_base::answer::{Answer, with_type};

const GROUP: &str = "config.k8s.io";
/// A deprecated version, whose responses have a warning.
const DEPRECATED: &str = "v1alpha1";
const VERSIONS: [&str; 2] = [DEPRECATED, "v1beta1"];

/// The negotiated format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Text,
    /// An object of this version as JSON.
    Json(&'static str),
    /// An object of this version as YAML.
    Yaml(&'static str),
    /// The client accepts no available format.
    Unacceptable,
}

/// A media type that the client accepts.
struct Clause<'a> {
    kind: &'a str,
    subkind: &'a str,
    quality: f64,
    params: Vec<(&'a str, &'a str)>,
}

impl<'a> Clause<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let mut parts = text.split(';').map(str::trim);
        let (kind, subkind) = match parts.next()? {
            "*" => ("*", "*"),
            name => name.split_once('/')?,
        };
        let mut clause = Self { kind, subkind, quality: 1.0, params: Vec::new() };
        for (name, value) in parts.filter_map(|p| p.split_once('=')) {
            match name.trim() {
                "q" => clause.quality = value.trim().parse().unwrap_or(1.0),
                name => clause.params.push((name, value.trim())),
            }
        }
        Some(clause)
    }

    fn takes(&self, kind: &str, subkind: &str) -> bool {
        (self.kind == kind && (self.subkind == subkind || self.subkind == "*"))
            || (self.kind == "*" && self.subkind == "*")
    }

    fn param(&self, wanted: &str) -> &'a str {
        self.params.iter().rfind(|(name, _)| *name == wanted).map_or("", |(_, value)| value)
    }

    /// Returns the version of `kind`, if the media type names group, version and kind.
    fn version(&self, kind: &str) -> Option<&'static str> {
        let is_meant = self.param("as") == kind && self.param("g") == GROUP;
        VERSIONS.into_iter().find(|version| is_meant && *version == self.param("v"))
    }

    fn form(&self, kind: &str) -> Option<Form> {
        // Neither watches nor transformations are supported.
        if !self.param("stream").is_empty() || !self.param("sv").is_empty() {
            return None;
        }
        if let Some(version) = self.version(kind) {
            if self.takes("application", "json") {
                return Some(Form::Json(version));
            }
            if self.takes("application", "yaml") {
                return Some(Form::Yaml(version));
            }
        }
        let names_a_kind = self.params.iter().any(|(name, _)| matches!(*name, "as" | "g" | "v"));
        (!names_a_kind && self.takes("text", "plain")).then_some(Form::Text)
    }
}

impl Form {
    /// Returns the format for an `Accept` header.
    pub(crate) fn from_accept(accept: Option<&str>, kind: &str) -> Self {
        let accept = accept.unwrap_or_default();
        if accept.trim().is_empty() {
            return Self::Text;
        }
        let mut clauses: Vec<Clause<'_>> = accept.split(',').filter_map(Clause::parse).collect();
        // Higher quality first; among equal ones, the order of the header.
        let is_any = |c: &Clause<'_>| (c.kind == "*", c.subkind == "*");
        clauses.sort_by(|a, b| b.quality.total_cmp(&a.quality).then(is_any(a).cmp(&is_any(b))));
        clauses.iter().find_map(|clause| clause.form(kind)).unwrap_or(Self::Unacceptable)
    }

    /// Responds with an object of this kind, or with 406.
    pub(crate) fn answer(self, kind: &str, mut fields: Value) -> Answer {
        let (Self::Json(version) | Self::Yaml(version)) = self else { return not_acceptable() };
        fields["kind"] = json!(kind);
        fields["apiVersion"] = json!(format!("{GROUP}/{version}"));
        fields["metadata"] = json!({"name": "kubelet"});
        let mut answer = match self {
            // JSON is valid YAML, but not what a client means by it.
            Self::Yaml(_) => match serde_saphyr::to_string(&fields) {
                Ok(text) => with_type(StatusCode::OK, "application/yaml", text),
                Err(_) => return not_acceptable(),
            },
            Self::Json(_) | Self::Text | Self::Unacceptable => {
                with_type(StatusCode::OK, "application/json", format!("{fields}\n"))
            }
        };
        if version == DEPRECATED {
            let page = kind.to_lowercase();
            let warning = format!(
                "299 - \"This version of the {page} endpoint is deprecated. Please use a newer version.\""
            );
            if let Ok(warning) = HeaderValue::from_str(&warning) {
                answer.headers_mut().insert(header::WARNING, warning);
            }
        }
        answer
    }
}

fn not_acceptable() -> Answer {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": "NotAcceptable", "code": 406,
        "message": "only the following media types are accepted: application/json, application/yaml, text/plain",
    });
    with_type(StatusCode::NOT_ACCEPTABLE, "application/json", format!("{status}\n"))
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;

    #[test]
    fn a_client_that_accepts_the_objects_kind_gets_json_and_others_get_text() {
        for (accept, want) in [
            ("", Form::Text),
            (" ", Form::Text),
            ("text/plain", Form::Text),
            ("text/plain;charset=utf-8", Form::Text),
            ("text/*", Form::Text),
            ("*/*", Form::Text),
            ("application/json;v=v1beta1;g=config.k8s.io;as=Flagz", Form::Json("v1beta1")),
            ("application/json; as=Flagz; g=config.k8s.io; v=v1alpha1", Form::Json("v1alpha1")),
            ("application/yaml;v=v1beta1;g=config.k8s.io;as=Flagz", Form::Yaml("v1beta1")),
            ("application/*;v=v1beta1;g=config.k8s.io;as=Flagz", Form::Json("v1beta1")),
            ("*/*;v=v1beta1;g=config.k8s.io;as=Flagz", Form::Json("v1beta1")),
            ("application/json;v=foo;g=config.k8s.io;as=Flagz,*/*", Form::Text),
            ("*/*,application/json;v=v1beta1;g=config.k8s.io;as=Flagz", Form::Json("v1beta1")),
            ("application/json;v=v1beta1;g=config.k8s.io;as=Flagz;q=0.5, text/plain", Form::Text),
            ("text/html,application/xhtml+xml,*/*;q=0.8", Form::Text),
            ("application/json", Form::Unacceptable),
            ("application/json;v=v1beta1;g=config.k8s.io", Form::Unacceptable),
            ("application/json;v=v1beta1;as=Flagz", Form::Unacceptable),
            ("application/json;v=v1beta1;g=config.k8s.io;as=Statusz", Form::Unacceptable),
            ("application/json;v=v1beta1;g=config.k8s.io;as=Flagz;stream=watch", Form::Unacceptable),
            ("application/cbor;v=v1beta1;g=config.k8s.io;as=Flagz", Form::Unacceptable),
            ("text/plain;v=v1beta1;g=config.k8s.io;as=Flagz", Form::Unacceptable),
            ("application/xml", Form::Unacceptable),
            ("nonsense", Form::Unacceptable),
        ] {
            assert_eq!(Form::from_accept(Some(accept), "Flagz"), want, "{accept:?}");
        }
        assert_eq!(Form::from_accept(None, "Flagz"), Form::Text);
    }

    #[tokio::test]
    async fn an_object_has_its_kind_and_a_deprecated_version_a_warning() {
        let read = async |form: Form| {
            let answer = form.answer("Flagz", json!({"flags": {"a": "b"}}));
            let header = |name| answer.headers().get(name).map(|v| v.to_str().unwrap().to_owned());
            let result = (answer.status().as_u16(), header(header::CONTENT_TYPE), header(header::WARNING));
            let body = answer.into_body().collect().await.unwrap().to_bytes();
            (result, String::from_utf8(body.to_vec()).unwrap())
        };
        let flagz = |version: &str| {
            json!({"kind": "Flagz", "apiVersion": format!("config.k8s.io/{version}"), "metadata": {"name": "kubelet"},
                "flags": {"a": "b"}})
        };
        let kind = |name: &str| Some(format!("application/{name}"));
        let (result, body) = read(Form::Json("v1beta1")).await;
        assert_eq!(result, (200, kind("json"), None));
        assert_eq!(serde_json::from_str::<Value>(&body).unwrap(), flagz("v1beta1"));
        let (result, body) = read(Form::Json("v1alpha1")).await;
        let warning =
            "299 - \"This version of the flagz endpoint is deprecated. Please use a newer version.\"";
        assert_eq!(result, (200, kind("json"), Some(warning.to_owned())));
        assert_eq!(serde_json::from_str::<Value>(&body).unwrap(), flagz("v1alpha1"));
        let (result, body) = read(Form::Yaml("v1beta1")).await;
        assert_eq!(result, (200, kind("yaml"), None));
        assert!(!body.contains('{') && body.contains("kind: Flagz\n"), "{body}");
        assert_eq!(serde_saphyr::from_str::<Value>(&body).unwrap(), flagz("v1beta1"));
        let (result, body) = read(Form::Unacceptable).await;
        assert_eq!(result, (406, kind("json"), None));
        assert_eq!(serde_json::from_str::<Value>(&body).unwrap()["reason"], "NotAcceptable");
    }
}
