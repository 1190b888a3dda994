"""Scripts for maintainers, for example to train and score the bundled model. They are not part of the installed
package."""
