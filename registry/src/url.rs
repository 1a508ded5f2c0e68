//! The address of a registry: `scheme://user:password@host:port,host:port/path?name=value`.

use std::fmt;

use crate::error::RegistryError;

/// The largest number of hosts in an address, more than an etcd cluster has members.
const HOSTS_MAX: usize = 16;

/// The decoded parts of a registry's address. `Debug` and `Display` never show the password.
#[derive(Clone, PartialEq, Eq)]
pub struct RegistryUrl {
    pub scheme: String,
    pub user: Option<User>,
    /// The hosts as `host` or `host:port`, at least one.
    pub hosts: Vec<String>,
    /// The path, without its first slash.
    pub path: String,
    pub query: Vec<(String, String)>,
}

/// The user name and password in an address.
#[derive(Clone, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub password: String,
}

impl RegistryUrl {
    pub fn parse(text: &str) -> Result<Self, RegistryError> {
        parse(text).map_err(|reason| RegistryError::Url { url: without_password(text), reason })
    }

    /// Makes an error about this address. The password is not shown.
    pub fn refuse(&self, reason: impl Into<String>) -> RegistryError {
        RegistryError::Url { url: self.to_string(), reason: reason.into() }
    }

    /// Checks that the query has only these `names`, each at most once.
    pub fn only(&self, names: &[&str]) -> Result<(), RegistryError> {
        for (at, (name, _)) in self.query.iter().enumerate() {
            if !names.contains(&name.as_str()) {
                return Err(self.refuse(format!("`{name}` is not known, only {}", names.join(", "))));
            }
            if self.query[..at].iter().any(|(earlier, _)| earlier == name) {
                return Err(self.refuse(format!("`{name}` is given twice")));
            }
        }
        Ok(())
    }

    pub fn value(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

fn parse(text: &str) -> Result<RegistryUrl, String> {
    let (scheme, rest) =
        text.split_once("://").ok_or("it must begin with a scheme, as in etcd://host:2379")?;
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (user, hosts) = match authority.rsplit_once('@') {
        Some((user, hosts)) => (Some(parse_user(user)?), hosts),
        None => (None, authority),
    };
    Ok(RegistryUrl {
        scheme: scheme.to_owned(),
        user,
        hosts: parse_hosts(hosts)?,
        path: decode(path)?,
        query: parse_query(query)?,
    })
}

fn parse_user(text: &str) -> Result<User, String> {
    let (name, password) = text.split_once(':').unwrap_or((text, ""));
    if name.is_empty() {
        return Err("the user before the @ has no name".to_owned());
    }
    Ok(User { name: decode(name)?, password: decode(password)? })
}

fn parse_hosts(text: &str) -> Result<Vec<String>, String> {
    let hosts: Vec<String> = text.split(',').map(str::to_owned).collect();
    if hosts.iter().any(String::is_empty) {
        return Err("a host is missing".to_owned());
    }
    if hosts.len() > HOSTS_MAX {
        return Err(format!("{} hosts are more than {HOSTS_MAX}", hosts.len()));
    }
    hosts.iter().try_for_each(|host| parse_port(host))?;
    Ok(hosts)
}

fn parse_port(host: &str) -> Result<(), String> {
    match port_of(host) {
        Some(port) if port.parse::<u16>().is_err() => Err(format!("`{port}` is not a port")),
        Some(_) | None => Ok(()),
    }
}

/// Returns the port in `host`, the text after the colon. Colons inside the brackets of an IPv6 address do not
/// count.
pub fn port_of(host: &str) -> Option<&str> {
    let name_end = host.rfind(']').map_or(0, |at| at + 1);
    host[name_end..].split_once(':').map(|(_, port)| port)
}

fn parse_query(text: &str) -> Result<Vec<(String, String)>, String> {
    let pairs = text.split('&').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (name, value) = pair.split_once('=').ok_or_else(|| format!("`{pair}` has no value"))?;
            Ok((decode(name)?, decode(value)?))
        })
        .collect()
}

/// Decodes percent-encoded characters such as `%40`.
fn decode(text: &str) -> Result<String, String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let (byte, after) = if *first == b'%' { decode_byte(after)? } else { (*first, after) };
        bytes.push(byte);
        rest = after;
    }
    String::from_utf8(bytes).map_err(|_| "it is not UTF-8 after decoding".to_owned())
}

fn decode_byte(after: &[u8]) -> Result<(u8, &[u8]), String> {
    let (digits, rest) = after.split_at_checked(2).ok_or("a % must be followed by two digits")?;
    let digits = std::str::from_utf8(digits).map_err(|_| "a % must be followed by two digits")?;
    let byte =
        u8::from_str_radix(digits, 16).map_err(|_| format!("%{digits} is not a byte; write a % as %25"))?;
    Ok((byte, rest))
}

/// Returns an unparsable address without the text between the scheme and the last @, which may hold a password.
fn without_password(text: &str) -> String {
    let (scheme, rest) = text.split_once("://").unwrap_or(("", text));
    match rest.rsplit_once('@') {
        Some((_, rest)) => format!("{scheme}://…@{rest}"),
        None => text.to_owned(),
    }
}

impl fmt::Display for RegistryUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://", self.scheme)?;
        if let Some(user) = &self.user {
            write!(f, "{}:…@", user.name)?;
        }
        write!(f, "{}/{}", self.hosts.join(","), self.path)
    }
}

impl fmt::Debug for RegistryUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("User").field("name", &self.name).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_parts() {
        let url = RegistryUrl::parse("etcd://me:p%40ss%3a@one:1,[::1]:2,three/blue?ca=/etc/ca.pem&x=a%20b");
        let url = url.expect("it is right");
        let user = User { name: "me".to_owned(), password: "p@ss:".to_owned() };
        assert_eq!((url.scheme.as_str(), url.user.clone()), ("etcd", Some(user)));
        assert_eq!(url.hosts, ["one:1", "[::1]:2", "three"]);
        assert_eq!(url.path, "blue");
        assert_eq!(
            (url.value("ca"), url.value("x"), url.value("y")),
            (Some("/etc/ca.pem"), Some("a b"), None)
        );
    }

    #[test]
    fn ports() {
        for (host, port) in
            [("a:1", Some("1")), ("a", None), ("[::1]", None), ("[::1]:9", Some("9")), ("a:", Some(""))]
        {
            assert_eq!(port_of(host), port, "{host}");
        }
    }

    #[test]
    fn what_is_wrong_is_said_and_passwords_are_not() {
        for (text, expected) in [
            ("localhost:2379", "localhost:2379: it must begin with a scheme, as in etcd://host:2379"),
            ("etcd://", "etcd://: a host is missing"),
            ("etcd://a,,b", "etcd://a,,b: a host is missing"),
            ("etcd://u:secret@a:x", "etcd://…@a:x: `x` is not a port"),
            ("etcd://u:sec%ret@a", "etcd://…@a: %re is not a byte; write a % as %25"),
            ("etcd://u:s@cret@a:x", "etcd://…@a:x: `x` is not a port"),
            ("etcd://:secret@a", "etcd://…@a: the user before the @ has no name"),
            ("etcd://a?ca", "etcd://a?ca: `ca` has no value"),
            ("etcd://a/%", "etcd://a/%: a % must be followed by two digits"),
        ] {
            let error = RegistryUrl::parse(text).expect_err(text);
            assert_eq!(error.to_string(), format!("registry address {expected}"));
        }
    }

    #[test]
    fn unknown_names_are_refused() {
        let only = |text| RegistryUrl::parse(text).expect("it can be read").only(&["ca", "key"]);
        assert!(only("etcd://a?ca=1&key=2").is_ok());
        let error = only("etcd://u:secret@a?cert=1").expect_err("not known");
        assert_eq!(error.to_string(), "registry address etcd://u:…@a/: `cert` is not known, only ca, key");
        let error = only("etcd://a?ca=1&ca=2").expect_err("twice");
        assert_eq!(error.to_string(), "registry address etcd://a/: `ca` is given twice");
    }

    #[test]
    fn debug_shows_no_password() {
        let url = RegistryUrl::parse("etcd://u:secret@a").expect("it is right");
        assert!(!format!("{url:?} {:?}", url.user).contains("secret"));
    }
}
