"""Character models of a text with secrets in it: does training memorise them?"""
