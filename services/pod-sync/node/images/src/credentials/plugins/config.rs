//! Configuration of credential provider plugins.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use quintlet_model::go_duration;
use serde::Deserialize;

/// The file of `--image-credential-provider-config`.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct ConfigFile {
    pub(super) api_version: String,
    pub(super) kind: String,
    pub(super) providers: Vec<ProviderConfig>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct ProviderConfig {
    pub(super) name: String,
    pub(super) match_images: Vec<String>,
    pub(super) default_cache_duration: String,
    pub(super) api_version: String,
    #[serde(default)]
    pub(super) args: Vec<String>,
    #[serde(default)]
    pub(super) env: Vec<EnvVar>,
    pub(super) token_attributes: Option<TokenAttributes>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EnvVar {
    pub(super) name: String,
    pub(super) value: String,
}

/// Requirements of a plugin on the pod's service account (`ServiceAccountTokenAttributes`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TokenAttributes {
    /// Audience of the token.
    pub service_account_token_audience: String,
    /// `ServiceAccount` or `Token`: the cache key of a response.
    pub cache_type: String,
    /// The plugin is skipped for pods without a service account.
    pub require_service_account: bool,
    /// Annotations of the account that must exist, or the plugin is skipped.
    #[serde(default)]
    pub required_service_account_annotation_keys: Vec<String>,
    /// Annotations of the account that are sent if they exist.
    #[serde(default)]
    pub optional_service_account_annotation_keys: Vec<String>,
}

impl TokenAttributes {
    /// Returns whether annotations of the account are needed.
    #[must_use]
    pub fn needs_annotations(&self) -> bool {
        !self.required_service_account_annotation_keys.is_empty()
            || !self.optional_service_account_annotation_keys.is_empty()
    }

    /// Returns the annotations to send; `None` if a required one is missing.
    #[must_use]
    pub fn select(&self, all: &BTreeMap<String, String>) -> Option<BTreeMap<String, String>> {
        let existing = |keys: &[String]| {
            let found = keys.iter().filter_map(|k| Some((k.clone(), all.get(k)?.clone())));
            found.collect::<BTreeMap<_, _>>()
        };
        let mut selected = existing(&self.required_service_account_annotation_keys);
        if selected.len() < self.required_service_account_annotation_keys.len() {
            return None;
        }
        selected.extend(existing(&self.optional_service_account_annotation_keys));
        Some(selected)
    }

    pub(super) fn check(&self) -> Result<(), String> {
        if self.service_account_token_audience.is_empty() {
            return Err("serviceAccountTokenAudience is empty".to_owned());
        }
        if !["ServiceAccount", "Token"].contains(&self.cache_type.as_str()) {
            return Err("cacheType is not ServiceAccount or Token".to_owned());
        }
        if !self.require_service_account && !self.required_service_account_annotation_keys.is_empty() {
            let why =
                "requiredServiceAccountAnnotationKeys must not be set if requireServiceAccount is false";
            return Err(why.to_owned());
        }
        let mut seen = BTreeSet::new();
        let keys = self.required_service_account_annotation_keys.iter();
        match keys.chain(&self.optional_service_account_annotation_keys).find(|k| !seen.insert(*k)) {
            Some(twice) => Err(format!("annotation key {twice:?} is duplicate")),
            None => Ok(()),
        }
    }
}

/// The configuration of plugins is invalid.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {problem}", path = path.display())]
pub struct ConfigError {
    pub(super) path: PathBuf,
    pub(super) problem: String,
}

/// Parses a duration. Returns none if it is negative.
pub(super) fn parse_duration(text: &str) -> Option<Duration> {
    go_duration::parse(text).ok().and_then(|nanos| u64::try_from(nanos).ok()).map(Duration::from_nanos)
}
