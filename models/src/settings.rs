//! The hub, the token and the cache folder, from the environment variables of the hub's own tools.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

const ENDPOINT: &str = "https://huggingface.co";

/// The settings of a download.
#[derive(Clone, PartialEq, Eq)]
pub struct HubSettings {
    /// The address of the hub as `https://host`, without a slash at its end.
    pub endpoint: String,
    /// The token of the user. It is sent to the hub only, never to a server that the hub redirects to.
    pub token: Option<String>,
    /// The cache folder, in which each model has a folder `models--org--name`.
    pub cache: PathBuf,
    /// If true, only the cache is used, without network.
    pub offline: bool,
    /// The certificate authorities to trust instead of the machine's, if any are set.
    pub authorities: Authorities,
    pub proxies: Proxies,
}

/// The proxies of requests, as addresses `http://host:port` that may have a user and a password. Empty: none.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Proxies {
    /// The proxy of requests for which no other is set.
    pub all: String,
    pub http: String,
    pub https: String,
    /// The hosts, domains and networks that are reached without a proxy, separated by commas. `*`: all.
    pub none_for: String,
}

impl std::fmt::Debug for Proxies {
    /// Prints nothing of the addresses, which may have passwords.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Proxies").finish_non_exhaustive()
    }
}

/// Files with certificate authorities.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Authorities {
    /// A PEM file with at least one certificate.
    pub file: Option<PathBuf>,
    /// A folder of PEM files. It may be empty if `file` is set.
    pub folder: Option<PathBuf>,
}

impl std::fmt::Debug for HubSettings {
    /// Prints all settings except the token.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HubSettings")
            .field("endpoint", &self.endpoint)
            .field("cache", &self.cache)
            .field("offline", &self.offline)
            .field("authorities", &self.authorities)
            .field("proxies", &self.proxies)
            .finish_non_exhaustive()
    }
}

impl HubSettings {
    /// Reads the settings from `HF_ENDPOINT`, `HF_TOKEN` or the token file, `HF_HUB_CACHE`, `HF_HOME` and
    /// `HF_HUB_OFFLINE`, from OpenSSL's `SSL_CERT_FILE` and `SSL_CERT_DIR`, and from `HTTPS_PROXY`, `HTTP_PROXY`,
    /// `ALL_PROXY` and `NO_PROXY`, in upper or lower case.
    pub fn from_env(env: impl Fn(&str) -> Option<OsString>) -> Self {
        let env = |name: &str| env(name).filter(|value| !value.is_empty());
        let text = |name: &str| env(name).and_then(|value| value.into_string().ok());
        let proxy = |name: &str| text(name).or_else(|| text(&name.to_lowercase())).unwrap_or_default();
        let home = hub_home(&env);
        let token_file = env("HF_TOKEN_PATH").map_or_else(|| home.join("token"), PathBuf::from);
        let token_in_file = || fs::read_to_string(token_file).ok();
        let token = text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN")).or_else(token_in_file);
        let cache = env("HF_HUB_CACHE").or_else(|| env("HUGGINGFACE_HUB_CACHE"));
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token: token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty()),
            cache: cache.map_or_else(|| home.join("hub"), PathBuf::from),
            offline: text("HF_HUB_OFFLINE").is_some_and(|value| is_true(&value)),
            authorities: Authorities {
                file: env("SSL_CERT_FILE").map(PathBuf::from),
                folder: env("SSL_CERT_DIR").map(PathBuf::from),
            },
            proxies: Proxies {
                all: proxy("ALL_PROXY"),
                http: proxy("HTTP_PROXY"),
                https: proxy("HTTPS_PROXY"),
                none_for: proxy("NO_PROXY"),
            },
        }
    }
}

/// Returns the folder in which the hub's tools keep all their files.
fn hub_home(env: &impl Fn(&str) -> Option<OsString>) -> PathBuf {
    let user_cache = || match env("XDG_CACHE_HOME") {
        Some(cache) => PathBuf::from(cache),
        None => PathBuf::from(env("HOME").unwrap_or_else(|| ".".into())).join(".cache"),
    };
    env("HF_HOME").map_or_else(|| user_cache().join("huggingface"), PathBuf::from)
}

fn is_true(value: &str) -> bool {
    ["1", "on", "yes", "true"].contains(&value.to_ascii_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(env: &[(&str, &str)]) -> HubSettings {
        let find = |name: &str| env.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into());
        HubSettings::from_env(find)
    }

    #[test]
    fn the_cache_is_where_the_hubs_tools_have_it() {
        for (env, expected) in [
            (&[("HOME", "/h")][..], "/h/.cache/huggingface/hub"),
            (&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (&[("HOME", "/h"), ("HF_HOME", "/f")], "/f/hub"),
            (&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")], "/c"),
            (&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "")], "/f/hub"),
        ] {
            assert_eq!(settings(env).cache, PathBuf::from(expected), "{env:?}");
        }
    }

    #[test]
    fn the_variable_comes_before_the_token_file() {
        let home = tempfile::tempdir().expect("a folder");
        let path = home.path().to_str().expect("UTF-8");
        assert_eq!(settings(&[("HF_HOME", path)]).token, None);
        fs::write(home.path().join("token"), "from the file\n").expect("written");
        assert_eq!(settings(&[("HF_HOME", path)]).token.as_deref(), Some("from the file"));
        assert_eq!(settings(&[("HF_HOME", path), ("HF_TOKEN", "typed")]).token.as_deref(), Some("typed"));
        assert!(!format!("{:?}", settings(&[("HF_TOKEN", "secret")])).contains("secret"));
    }

    #[test]
    fn endpoint_and_offline() {
        assert_eq!(settings(&[]).endpoint, ENDPOINT);
        assert_eq!(settings(&[("HF_ENDPOINT", "http://mirror:1/")]).endpoint, "http://mirror:1");
        assert!(!settings(&[]).offline && !settings(&[("HF_HUB_OFFLINE", "0")]).offline);
        assert!(settings(&[("HF_HUB_OFFLINE", "True")]).offline);
    }

    #[test]
    fn proxies_are_named_in_upper_or_lower_case() {
        assert!(settings(&[]).proxies == Proxies::default());
        let found =
            settings(&[("HTTPS_PROXY", "http://user:secret@p:1"), ("no_proxy", "*"), ("http_proxy", "p:2")]);
        let Proxies { all, http, https, none_for } = &found.proxies;
        assert_eq!([all, http, https, none_for], ["", "p:2", "http://user:secret@p:1", "*"]);
        assert!(!format!("{found:?}").contains("secret"));
    }

    #[test]
    fn authorities_are_those_that_openssl_would_take() {
        assert_eq!(settings(&[]).authorities, Authorities::default());
        assert_eq!(settings(&[("SSL_CERT_FILE", "")]).authorities, Authorities::default());
        let both = settings(&[("SSL_CERT_FILE", "/ca.pem"), ("SSL_CERT_DIR", "/cas")]).authorities;
        assert_eq!(both, Authorities { file: Some("/ca.pem".into()), folder: Some("/cas".into()) });
    }
}
