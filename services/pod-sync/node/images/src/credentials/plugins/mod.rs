//! Exec credential providers: programs that return credentials for an image
//! (`pkg/credentialprovider/plugin`).

mod account;
mod config;
mod exec;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pod_sync_node_decisions::image_access::ImagePullServiceAccount;
use pod_sync_node_decisions::image_name;
use quintlet_kit::clock::Clock;
use quintlet_kit::task;
use tokio::sync::{Semaphore, watch};

pub use self::account::PluginAccount;
pub use self::config::{ConfigError, TokenAttributes};

use self::config::{ConfigFile, ProviderConfig, parse_duration};
use self::exec::{Program, Response};
use super::keyring::{self, Credential, Keyring};

/// Responses in the cache. Usually there is one per registry.
const CACHED: usize = 256;
const API_GROUP: &str = "credentialprovider.kubelet.k8s.io";

/// Service accounts by index of the plugin in the configuration. `None`: the plugin is skipped for this pod.
pub type PluginAccounts = BTreeMap<usize, Option<PluginAccount>>;

#[derive(Debug)]
struct Plugin {
    program: Program,
    default_cache: Duration,
    state: Mutex<State>,
}

/// Cached responses and processes in flight.
#[derive(Debug, Default)]
struct State {
    cache: HashMap<String, Answer>,
    /// Runs in flight, by account and registry: images of one registry share a run, and registries do not
    /// wait for each other.
    in_flight: HashMap<String, watch::Receiver<Option<Outcome>>>,
}

/// Result of a run: the cache key of the response, and its credentials.
type Outcome = Result<(String, Arc<Keyring>), String>;

/// Possible cache keys of a response for an image.
#[derive(Debug, Clone)]
struct Keys {
    image: String,
    registry: String,
    global: String,
}

impl Keys {
    fn of(image: &str, repository: &str, who: &str) -> Self {
        Self {
            image: format!("{who}\0image {image}"),
            registry: format!("{who}\0registry {}", image_name::registry(repository)),
            global: format!("{who}\0global"),
        }
    }

    fn all(&self) -> [&String; 3] {
        [&self.image, &self.registry, &self.global]
    }
}

#[derive(Debug, Clone)]
struct Answer {
    keyring: Arc<Keyring>,
    until: Duration,
}

/// All configured plugins, in the order of the file.
#[derive(Debug)]
pub struct Plugins {
    plugins: Vec<Arc<Plugin>>,
    clock: Clock,
}

impl Plugins {
    /// Reads the configuration; programs are in `bin_dir`.
    ///
    /// # Errors
    /// The file cannot be read, has an unknown or invalid field, or names a program that does not exist.
    pub fn load(config: &Path, bin_dir: &Path, clock: Clock) -> Result<Self, ConfigError> {
        let error = |problem: String| ConfigError { path: config.to_owned(), problem };
        let text = std::fs::read_to_string(config).map_err(|e| error(e.to_string()))?;
        let file: ConfigFile = serde_saphyr::from_str(&text).map_err(|e| error(e.to_string()))?;
        if file.kind != "CredentialProviderConfig" || !file.api_version.starts_with("kubelet.config.k8s.io/")
        {
            return Err(error(format!(
                "expected CredentialProviderConfig of kubelet.config.k8s.io, found {} of {}",
                file.kind, file.api_version
            )));
        }
        let plugins =
            file.providers.into_iter().map(|p| Plugin::new(p, bin_dir).map(Arc::new).map_err(error));
        Ok(Self { plugins: plugins.collect::<Result<_, _>>()?, clock })
    }

    /// Returns the service account requirements of the plugins for this repository, by index.
    pub fn token_attributes<'a>(
        &'a self,
        repository: &'a str,
    ) -> impl Iterator<Item = (usize, &'a TokenAttributes)> + 'a {
        let all = self.plugins.iter().enumerate().filter(|(_, p)| p.is_for(repository));
        all.filter_map(|(place, p)| Some((place, p.program.config.token_attributes.as_ref()?)))
    }

    /// Returns the credentials of all plugins for a repository, each with the service account that it was
    /// issued for. A plugin that fails is logged and returns none.
    pub async fn lookup(
        &self,
        image: &str,
        repository: &str,
        accounts: &PluginAccounts,
    ) -> Vec<(Credential, Option<ImagePullServiceAccount>)> {
        let mut out = Vec::new();
        for (place, plugin) in self.plugins.iter().enumerate().filter(|(_, p)| p.is_for(repository)) {
            let account = match (&plugin.program.config.token_attributes, accounts.get(&place)) {
                (None, _) => None,
                (Some(_), Some(None)) => continue,
                (Some(t), None) if t.require_service_account => continue,
                (Some(_), None) => None,
                (Some(_), Some(Some(account))) => Some(account),
            };
            match self.ask(plugin, image, repository, account).await {
                Ok(keyring) => {
                    let used = account.map(|a| a.account.clone());
                    out.extend(keyring.lookup(repository).into_iter().map(|c| (c, used.clone())));
                }
                Err(why) => {
                    tracing::warn!(
                        plugin = plugin.program.config.name,
                        image,
                        why,
                        "credential provider failed"
                    );
                }
            }
        }
        out
    }

    /// Returns the plugin's response for an image: from the cache, from a run in flight, or from a new run.
    /// Dropping the call does not end the run.
    async fn ask(
        &self,
        plugin: &Arc<Plugin>,
        image: &str,
        repository: &str,
        account: Option<&PluginAccount>,
    ) -> Result<Arc<Keyring>, String> {
        let attributes = plugin.program.config.token_attributes.as_ref();
        let by_token = attributes.is_some_and(|t| t.cache_type == "Token");
        let who = account.map_or_else(String::new, |a| {
            if by_token { format!("{}\0{}", a.token, a.key()) } else { a.key() }
        });
        let keys = Keys::of(image, repository, &who);
        loop {
            let mut run = match plugin.known_or_run(image, &keys, account, &self.clock) {
                Ok(known) => return Ok(known),
                Err(run) => run,
            };
            let ended = run.wait_for(Option::is_some).await;
            let outcome = ended.ok().and_then(|outcome| outcome.clone());
            let (key, keyring) = outcome.unwrap_or_else(|| Err("the process was aborted".to_owned()))?;
            // The response of a run for another image of the registry may apply to that image only.
            if keys.all().contains(&&key) {
                return Ok(keyring);
            }
        }
    }
}

impl Plugin {
    fn new(config: ProviderConfig, bin_dir: &Path) -> Result<Self, String> {
        let name = &config.name;
        if name.is_empty() || name.contains(['/', ' ']) || name == "." || name == ".." {
            return Err(format!("providers.name: {name:?} is not a file name"));
        }
        let program = bin_dir.join(name);
        if !program.is_file() {
            return Err(format!("providers.name: program {} does not exist", program.display()));
        }
        if config.match_images.is_empty() {
            return Err(format!("providers.matchImages of {name}: at least one pattern is required"));
        }
        if !config.api_version.starts_with(&format!("{API_GROUP}/v1")) {
            return Err(format!("providers.apiVersion of {name}: {:?} is not supported", config.api_version));
        }
        let default_cache = parse_duration(&config.default_cache_duration)
            .ok_or_else(|| format!("providers.defaultCacheDuration of {name} is not a duration"))?;
        if let Some(t) = &config.token_attributes {
            t.check().map_err(|why| format!("providers.tokenAttributes of {name}: {why}"))?;
        }
        let program = Program { config, path: program, runs: Semaphore::new(exec::RUNS) };
        Ok(Self { program, default_cache, state: Mutex::default() })
    }

    /// Returns the cached response, or else the run in flight for this account and registry, which is started
    /// if there is none.
    fn known_or_run(
        self: &Arc<Self>,
        image: &str,
        keys: &Keys,
        account: Option<&PluginAccount>,
        clock: &Clock,
    ) -> Result<Arc<Keyring>, watch::Receiver<Option<Outcome>>> {
        let mut state = self.state.lock();
        let now = clock.boot();
        state.cache.retain(|_, a| a.until > now);
        if let Some(known) = keys.all().into_iter().find_map(|k| state.cache.get(k)) {
            return Ok(Arc::clone(&known.keyring));
        }
        // A run that was aborted leaves its entry without a result.
        if let Some(run) = state.in_flight.get(&keys.registry).filter(|run| run.has_changed().is_ok()) {
            return Err(run.clone());
        }
        let (ended, run) = watch::channel(None);
        state.in_flight.insert(keys.registry.clone(), run.clone());
        let plugin = Arc::clone(self);
        let keys = keys.clone();
        let clock = clock.clone();
        let (image, account) = (image.to_owned(), account.cloned());
        drop(task::spawn("credential provider", async move {
            let answered = plugin.program.run(&image, account.as_ref()).await;
            let outcome = plugin.keep(answered, &keys, &clock);
            plugin.state.lock().in_flight.remove(&keys.registry);
            ended.send_replace(Some(outcome));
        }));
        Err(run)
    }

    /// Caches a response for its duration.
    fn keep(&self, answered: Result<Response, String>, keys: &Keys, clock: &Clock) -> Outcome {
        let response = answered?;
        let key = match response.cache_key_type.as_str() {
            "Image" => &keys.image,
            "Registry" => &keys.registry,
            "Global" => &keys.global,
            other => return Err(format!("cacheKeyType {other:?} is not Image, Registry or Global")),
        };
        let life = match &response.cache_duration {
            Some(text) => parse_duration(text).ok_or("cacheDuration is not a duration")?,
            None => self.default_cache,
        };
        let entries = response
            .auth
            .into_iter()
            .map(|(k, a)| (k, Credential { username: a.username, password: a.password }));
        let keyring = Arc::new(Keyring::new(entries.collect()));
        let cache = &mut self.state.lock().cache;
        if !life.is_zero() && cache.len() < CACHED {
            let until = clock.boot().saturating_add(life);
            cache.insert(key.clone(), Answer { keyring: Arc::clone(&keyring), until });
        }
        Ok((key.clone(), keyring))
    }

    fn is_for(&self, repository: &str) -> bool {
        self.program.config.match_images.iter().any(|pattern| keyring::matches(pattern, repository))
    }
}

#[cfg(test)]
mod tests;
